"""Texts about one image or two, with a label: entailment and NLVR2."""
