"""Train both ports on the phrasebook with every method, and print a table of losses.

python examples/custom_seq2seq/run.py [--sentences 2000] [--epochs 2] [--methods none,ad_drop] [--faces loop]
"""

import argparse
import multiprocessing
import os
import shlex
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import loop  # noqa: E402

FLAGS = {
    "none": "--attn-reg none",
    "ad_drop": "--attn-reg ad_drop --ad-drop-p 0.3 --ad-drop-q 0.3",
    "attend_out": "--attn-reg attend_out --attend-out-steps 4 --attend-out-initial-keep 0.9",
    "attention_layer_drop": "--attn-reg attention_layer_drop --attention-layer-drop-p 0.1",
    "scheduled_dropout": "--attn-reg scheduled_dropout --scheduled-dropout-schedule 'drop *: 0:0.3 100:0.05'",
}
TRAINING = (
    "--task regularized_letters --arch letterwise --attn-sites * --criterion cross_entropy --optimizer adam --lr 3e-3 "
    "--batch-size 32 --required-batch-size-multiple 1 --cpu --seed 1 --num-workers 0 --no-epoch-checkpoints "
    "--no-progress-bar --restore-file none --attn-rates-by-site"
)


def fairseq_train(command: list[str], log: Path) -> None:
    """The console script `fairseq-train`, in this process."""
    from fairseq_cli.train import cli_main

    torch.set_num_threads(1)
    with log.open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.argv = ["fairseq-train", *command]
    cli_main()


def under_fairseq(method: str, arguments: argparse.Namespace) -> float:
    """Train the model of the user dir; the best validation loss of a letter, in nats."""
    folder = arguments.out / method
    command = [str(arguments.out / "text"), "--user-dir", str(HERE / "letterwise"), "--save-dir", str(folder)]
    command += ["--max-epoch", str(arguments.epochs), "--width", str(arguments.width)]
    command += shlex.split(TRAINING.replace("*", "'*'")) + shlex.split(FLAGS[method])
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "fork")
    process = context.Process(target=fairseq_train, args=(command, folder / "log.txt"))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"fairseq-train failed; {folder / 'log.txt'} says why")
    kept = torch.load(folder / "checkpoint_best.pt", weights_only=True)["extra_state"]
    return kept["best"] * 0.6931471805599453  # fairseq counts bits


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Train; the best validation loss by face and method."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--methods", default=",".join(FLAGS), help="of none, ad_drop, attend_out, ...")
    flags.add_argument("--faces", default="loop,fairseq", help="the user's own loop, fairseq with a user dir")
    flags.add_argument("--sentences", type=int, default=2000, help="training sentences")
    flags.add_argument("--epochs", type=int, default=4)
    flags.add_argument("--width", type=int, default=64, help="of both models")
    flags.add_argument("--out", type=Path, default=Path("runs/custom_seq2seq"))
    arguments = flags.parse_args(argv)
    torch.set_num_threads(1)
    methods, faces = arguments.methods.split(","), arguments.faces.split(",")
    found: dict[str, dict[str, float]] = {face: {} for face in faces}
    if "fairseq" in faces:
        import fairseq_cli.train  # once: the trainings are forked

        from attn_reg_plugin.corpora.phrasebook import splits

        text = arguments.out / "text"
        text.mkdir(parents=True, exist_ok=True)
        for split, triples in splits(arguments.sentences, 100, 1).items():
            for language in ("en", "ro"):
                lines = "".join(f"{getattr(each, language)}\n" for each in triples)
                (text / f"{split}.{language}").write_text(lines, encoding="utf-8")
        assert fairseq_cli.train
    for face in faces:
        for method in methods:
            if face == "loop":
                losses = loop.train(method, arguments.epochs, arguments.sentences, arguments.width)
                found[face][method] = min(losses[1:])
            else:
                found[face][method] = under_fairseq(method, arguments)
            print(f"{face:8} {method:21} {found[face][method]:.5f} nats a letter", flush=True)
    return found


if __name__ == "__main__":
    main()
