"""Packaging of attn_reg_plugin. Only torch is needed to import it; the extras bring the frameworks."""

from pathlib import Path

from setuptools import find_packages, setup

FAIRSEQ = ["fairseq-fixed==0.12.3.1", "scikit-learn>=1.3", "scipy>=1.15", "seqeval>=1.2.2"]
HF = ["transformers>=5.23", "accelerate>=1.0"]
EXPERIMENTS = ["numpy", "sacrebleu>=2.4", "sentencepiece>=0.2", "datasets>=3.0", "rich>=13.0", "matplotlib>=3.8"]
EXPERIMENTS += ["omegaconf>=2.3", "optuna>=4.0", "scipy>=1.15", "pandas>=2.2", "tabulate>=0.9"]
DEV = ["pytest>=8.0", "hypothesis>=6", "ruff>=0.8", "import-linter>=2.0", "tensorboardX", "pytest-xdist>=3.6"]
CLIENTS = ["trl>=1.16", "peft>=0.21", "sentence-transformers>=6.2", "setfit>=1.2", "lightning>=2.6"]
DOCS = ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"]

setup(
    name="attn_reg_plugin",
    version="0.1.0",
    description="AD-DROP and AttendOut: attention regularizers for fairseq, Hugging Face and plain PyTorch",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["attn_reg_plugin", "attn_reg_plugin.*"]),
    package_data={"attn_reg_plugin": ["py.typed", "corpora/*.gz", "corpora/*.md"]},
    python_requires=">=3.11",
    install_requires=["torch>=2.6"],
    extras_require={
        "fairseq": FAIRSEQ,
        "hf": HF,
        "experiments": EXPERIMENTS,
        "clients": CLIENTS,
        "dev": DEV,
        "docs": DOCS,
    },
    entry_points={"console_scripts": ["attn-reg=attn_reg_plugin.cli:main"]},
)
