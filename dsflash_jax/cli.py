"""The `dsflash` command: one small function a subcommand, which imports its implementation when it is called.

Exit status: 0 success; 1 a check that missed, or a failure; 2 a command line or configuration that is wrong, with one
line on stderr. A subcommand's function takes the parsed arguments and returns the exit status.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dsflash_jax import output
from dsflash_jax.config import hint

WRONG_USE = 2
LEGEND = """Print the mode string, the layer table and the plan of scans; refuse an illegal table with layer and fix.

S     window only
F2    makes keys and values, 2 tokens a slot, and selects among them
X U   selects anew, reuses what was selected
p e t   flags: picks candidate blocks for later X layers, has n-gram memory, feeds the draft head
2(F2 3U)   twice F2 U U U"""


DECODE = """Decode from fresh weights behind a cache of zeros and print tokens a second, plainly and with a draft head
that is not trained and one whose drafts are all right: the two ends of what drafting gives."""
LAYOUTS = """Train a run for some steps on one device and on each layout, from the same weights on the same batches.

Prints a line a layout: the largest difference of a loss to one device, relative to it; the last loss; the median time
of a step, and how many times that of one device it is; bytes of a device that the compiled step takes, and the most
that were in use, where the device knows it and it is more than of the layouts before. Exit status 1 if a loss differs
by more than the tolerance. Writes no file but --json.

A GPU multiplies float32 in fewer bits unless JAX_DEFAULT_MATMUL_PRECISION=highest is set."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser, names = build_parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in names:
        refuse(f"unknown subcommand {arguments[0]!r}{hint(arguments[0], names)} (there are: {', '.join(names)})")
    parsed, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(parsed, "overrides") or any("=" not in x or x.startswith("-") for x in rest)):
        refuse(f"unexpected {' '.join(rest)} (see dsflash {arguments[0]} --help)")
    if rest:  # overrides behind an option: argparse takes them in one place only
        parsed.overrides = [*parsed.overrides, *rest]
    check_writable(parsed.json, "--json")
    return int(parsed.function(parsed))


def refuse(message: object) -> NoReturn:
    """Leave with status 2 and one line that says what is wrong with the request."""
    print(f"dsflash: {message}", file=sys.stderr)
    raise SystemExit(WRONG_USE)


def check_writable(path: Path | None, flag: str) -> None:
    """Make the folder of a flag's path; one that cannot be written is refused before any work is done for it."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.resolve()  # a link to what is not there yet stays
        new = not target.exists()
        target.open("a").close()
        if new:
            target.unlink()  # a run that fails leaves no empty result
    except OSError as error:
        refuse(f"{flag} {path} cannot be written: {error.strerror}; give the path of a file")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all others of this command."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        refuse(f"{message} (see {self.prog} --help)")


def build_parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """The command line and the names of its subcommands."""
    parser = Parser(prog="dsflash", description="DeepSeek-V4.1-Flash in JAX and Flax: train it, check it, study it.")
    commands = parser.add_subparsers(required=True, metavar="SUBCOMMAND")

    train = add(
        commands,
        run_train,
        "train",
        "train a model, or go on from its newest checkpoint",
        "Train with progress, held-out evaluation, checkpoints and a sample; Ctrl-C saves; the same command goes on.",
        "dsflash train demo steps=50 optim.peak=5e-3 out=runs/short",
    )
    train.add_argument("config", metavar="CONFIG", help="a name in configs/, or a Python file that defines config")
    add_overrides(train)

    parity = add(
        commands,
        run_parity,
        "parity",
        "compare the model with recorded arrays of the published reference",
        "Run every covered trace of a folder and print a line an array; exit status 1 on a miss.",
        "dsflash parity tests/golden/tiny_text",
    )
    parity.add_argument("folder", metavar="DIR", type=Path, help="a model with inputs and traces, or op vectors")

    modes = add(
        commands,
        run_modes,
        "modes",
        "show and check the layers of a configuration or of a mode string",
        LEGEND,
        "dsflash modes 'S S 2(F2 3U) F1p 2U 2(X 2U)'",
    )
    modes.add_argument("source", metavar="CONFIG_OR_STRING", help="a configuration, or a mode string in quotes")
    add_overrides(modes)

    describe = add(
        commands,
        run_describe,
        "describe",
        "count parameters, cache bytes, FLOPs and checkpoint bytes of a configuration",
        "Print what a model is and costs, from its configuration alone; nothing is allocated.",
        "dsflash describe released --json released.json",
    )
    describe.add_argument("config", metavar="CONFIG", help="a name in configs/, a Python file, or a config.json")
    describe.add_argument(
        "--step", action="store_true", help="compile the decode step, too, and count its products: minutes"
    )
    add_overrides(describe)

    from train import flags

    compile_ = add(
        commands,
        run_compile,
        "compile",
        "compile a training or decode step for TPUs that are not here, and say whether it fits",
        flags.COMPILE,
        "dsflash compile pretrain_64k --topology v5p:4x8x8",
    )
    flags.add_compile(compile_)
    add_overrides(compile_)

    generate = add(
        commands,
        run_generate,
        "generate",
        "go on from a prompt, or from a file of prompts, with a trained model",
        flags.GENERATE,
        "dsflash generate runs/demo --prompt 'def ' --max-tokens 200 --temperature 0.7",
    )
    flags.add(generate)
    add_overrides(generate)

    bench = commands.add_parser(
        "bench",
        help="measure what a run takes on the devices that are here",
        description="Benchmarks; dsflash bench KIND --help says what each measures.",
        epilog="example: dsflash bench layouts demo --layouts fsdp=2 --json PATH",
    )
    add_benchmarks(bench.add_subparsers(required=True, metavar="KIND"))
    return parser, list(commands.choices)


def add_benchmarks(kinds: Any) -> None:
    """Add the kinds of `dsflash bench`."""
    layouts = add(
        kinds,
        run_bench_layouts,
        "layouts",
        "compare layouts with one device: losses, step time, memory",
        LAYOUTS,
        "dsflash bench layouts demo layout.whole=0 --layouts fsdp=2 expert=2,capacity=4 context=2",
    )
    layouts.add_argument("config", metavar="CONFIG", help="a name in configs/, or a Python file that defines config")
    layouts.add_argument(
        "--layouts", metavar="AXIS=N,...", nargs="+", required=True, help="the layouts; axes that one leaves out are 1"
    )
    layouts.add_argument("--steps", metavar="N", type=int, default=10, help="steps on each; default 10")
    tolerance = "largest relative difference of a loss; default 1e-4 in float32, 1e-2 in bfloat16"
    layouts.add_argument("--tolerance", metavar="X", type=float, help=tolerance)
    add_overrides(layouts)
    decode = add(
        kinds,
        run_bench_decode,
        "decode",
        "tokens a second, plainly and with drafts that are all wrong or all right",
        DECODE,
        "dsflash bench decode demo --tokens 64 --rows 1 --json PATH",
    )
    decode.add_argument("config", metavar="CONFIG", help="a name in configs/, or a Python file that defines config")
    decode.add_argument(
        "--tokens", metavar="N", type=int, default=64, help="tokens of a row that are timed; default 64"
    )
    decode.add_argument("--rows", metavar="N", type=int, default=1, help="rows that decode together; default 1")
    context = "tokens before them; default half of what the model reads"
    decode.add_argument("--context", metavar="N", type=int, default=0, help=context)
    add_overrides(decode)


def add(
    commands: Any, function: Callable[[argparse.Namespace], int], name: str, short: str, what: str, example: str
) -> argparse.ArgumentParser:
    """Add one subcommand: what it does, an example, and the --json that all of them take."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=short,
        description=what,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="PATH", type=Path, help="also write the result there, for programs")
    parser.set_defaults(function=function)
    return parser


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the `key=value` arguments that `overrides.override` reads."""
    what = "change a field: index_topk=64 of a model, model.index_topk=64 of a run"
    parser.add_argument("overrides", metavar="key=value", nargs="*", help=what)


def read_config(source: str, overrides: Iterable[str], needs: str = "") -> Any:
    """The configuration of a command line; a wrong one ends the command with status 2.

    So does one of a model alone, whatever the overrides, where `needs` says what a run is needed for.
    """
    from dsflash_jax.overrides import find, override

    try:
        found = find(source)
        if needs:
            from train.config import Run

            if not isinstance(found, Run):
                refuse(f"{source} describes a model only; {needs}, like demo")
        return override(found, list(overrides))
    except (ValueError, FileNotFoundError) as error:
        refuse(error)


def write_json(path: Path | None, result: Any) -> None:
    """Write the result; a file that cannot be written ends the command with status 2."""
    try:
        output.write_json(path, result)
    except ValueError as error:
        refuse(error)


def run_train(arguments: argparse.Namespace) -> int:
    """`dsflash train`."""
    needs = "training needs a run with data, optim and steps"
    run = read_config(arguments.config, arguments.overrides, needs)
    from train import main as training

    try:
        return training.run(run, arguments.json)
    except (ValueError, FileNotFoundError) as error:
        refuse(error)
    except OSError as error:  # a full disk, mostly
        print(f"dsflash: stopped: {error}; the same command goes on from the newest checkpoint", file=sys.stderr)
        return 1


def run_compile(arguments: argparse.Namespace) -> int:
    """`dsflash compile`."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # no device is needed, and none of this machine must be waited for
    changes = [] if arguments.seq_len is None else [f"data.seq_len={arguments.seq_len}"]
    if arguments.mesh is not None:
        from dsflash_jax.sharding import AXES

        changes += [f"layout.{axis}=1" for axis in AXES] + [f"layout.{part}" for part in arguments.mesh.split(",")]
    if arguments.rows is not None and not arguments.decode:
        refuse("--rows are those of a decode step: add --decode, or set data.batch_size")
    needs = "a step needs a run with data, optim and layout"
    run = read_config(arguments.config, [*arguments.overrides, *changes], needs)
    from train import ahead

    try:
        rows = arguments.rows or 0 if arguments.decode else None
        made = ahead.main(run, arguments.topology, arguments.search, not arguments.no_code, rows)
    except (ValueError, FileNotFoundError, ImportError) as error:
        refuse(error)
    write_json(arguments.json, made)
    return int(not made["fits"])


def run_generate(arguments: argparse.Namespace) -> int:
    """`dsflash generate`."""
    check_writable(arguments.out, "--out")
    check_writable(arguments.save_prefix, "--save-prefix")
    written = [path.resolve() for path in (arguments.out, arguments.json, arguments.save_prefix) if path is not None]
    if len(set(written)) < len(written):
        refuse("--out, --json and --save-prefix write to one path: give each its own")
    for flag, path in (("--prompts", arguments.prompts), ("--prefix", arguments.prefix)):
        if path is not None and path.resolve() in written:
            refuse(f"{flag} {path} would be overwritten: give what is written another path")
    from train import flags, generate
    from train.prompts import Line

    a = arguments
    common = {key: value for key in flags.DRAWING if (value := getattr(a, key)) is not None}
    try:
        made = generate.main(generate.Asked(
            a.source, a.overrides, a.prompts, Line(a.prompt, a.ids), a.out, common, a.logprobs, a.batch, a.prefill,
            a.compare_exact, a.draft, a.threshold, a.chunk, a.save_prefix, a.prefix,
        ))  # fmt: skip
    except BrokenPipeError:  # who reads the output has left, as head does; Python would flush into the pipe again
        sys.stdout = None
        return 1
    except (ValueError, FileNotFoundError) as error:
        refuse(error)
    except OSError as error:  # of stdout, for the files of flags are named by ValueError
        sys.stdout = None
        refuse(f"the output cannot be written: {error.strerror or error}; give --out another path")
    write_json(a.json, made)
    return int(not made["finished"])


def run_bench_layouts(arguments: argparse.Namespace) -> int:
    """`dsflash bench layouts`."""
    run = read_config(arguments.config, arguments.overrides, "a benchmark of training needs a run")
    from train import bench

    try:
        made = bench.layouts(run, arguments.layouts, arguments.steps, arguments.tolerance)
    except (ValueError, FileNotFoundError) as error:
        refuse(error)
    write_json(arguments.json, made)
    return int(not made["passed"])


def run_bench_decode(arguments: argparse.Namespace) -> int:
    """`dsflash bench decode`."""
    run = read_config(arguments.config, arguments.overrides, "a benchmark needs a run, which says how the model runs")
    from train import bench_decode

    try:
        made = bench_decode.decode(run, arguments.tokens, arguments.rows, arguments.context)
    except ValueError as error:
        refuse(error)
    write_json(arguments.json, made)
    return 0


def run_parity(arguments: argparse.Namespace) -> int:
    """`dsflash parity`."""
    from dsflash_jax import parity

    try:
        return parity.main(arguments.folder, arguments.json)
    except ValueError as error:
        refuse(error)


def run_modes(arguments: argparse.Namespace) -> int:
    """`dsflash modes`."""
    from dsflash_jax import layer_sheet

    if layer_sheet.is_mode_string(arguments.source):
        if arguments.overrides:
            refuse(f"a mode string takes no overrides, got {arguments.overrides}; give a configuration and modes=...")
        try:
            config = layer_sheet.config_of(arguments.source)
        except ValueError as error:
            refuse(error)
    else:
        config = read_config(arguments.source, arguments.overrides)
        config = getattr(config, "model", config)  # a run holds its architecture there
    layer_sheet.show(config.table)
    write_json(arguments.json, layer_sheet.as_json(config.table))
    return 0


def run_describe(arguments: argparse.Namespace) -> int:
    """`dsflash describe`."""
    config = read_config(arguments.config, arguments.overrides)
    from dsflash_jax import describe

    model = getattr(config, "model", config)  # a run holds its architecture there
    try:
        facts = describe.main(model)
        if arguments.step:
            from train import decode_step

            facts["step"] = decode_step.main(model)
    except ValueError as error:
        refuse(error)
    write_json(arguments.json, facts)
    return 0
