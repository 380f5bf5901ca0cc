# An image that runs `vlightning`:
#   docker build -t vlightning .                                          for CPUs
#   docker build -t vlightning --build-arg TORCH_BACKEND=cu130 .           for NVIDIA GPUs, whose libraries torch brings
#   docker run --rm -v "$PWD:/work" vlightning fit --config configs/albef/quickstart.yaml
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" vlightning fit ...   loader workers share memory
FROM python:3.13-slim

# cpu, cu128, cu130, ...: which build of torch `uv pip install --torch-backend` takes.
ARG TORCH_BACKEND=cpu
# Extras of the package, for example "[lora,onnx,search,demo]".
ARG EXTRAS=""

ENV PYTHONUNBUFFERED=1 \
    UV_COMPILE_BYTECODE=1 \
    UV_NO_CACHE=1

# A compiler, which torch.compile needs when a run begins.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++=4:* \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir "uv>=0.7,<1"

COPY . /source
RUN uv pip install --system --torch-backend "${TORCH_BACKEND}" "/source${EXTRAS}" \
    && rm -r /source

# Not root: files in a mounted folder then belong to the user with this number, which `--user` changes.
RUN useradd --create-home --uid 1000 trainer
USER 1000
WORKDIR /work
ENTRYPOINT ["vlightning"]
