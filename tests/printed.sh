# Sourced by test_printed.py: a folder in which the commands of the documentation run, and what the
# last column of printed.tsv names.
trap 'kill $(jobs -p) || true' EXIT
PATH=$PWD/.venv/bin:$PATH
export MPLBACKEND=Agg APP__BASE_EXP_DIR=runs APP__RUN_NAME=mine
export APP__REWARD_FUNCTION_API_BASE=http://judge:4877

rl() ( # tiny_pages.serve runs it
    until [[ -p answered ]]; do sleep 0.1; done
    { printf '%s\0' "$BASHPID" $# "$@"; env -0; } >asked
    read -r code <answered
    exit "$code"
)
check() { rl check "${@:3}" base_exp_dir=no_runs; } # check rl train CONFIG ...
config() { # the config $1 with the block, between $2 and $3
    { echo "(import '$1.jsonnet') + {$2" && cat && echo "$3}"; } >part.jsonnet
    check rl train part.jsonnet
}
parse() { PYTHONPATH=$PWD/parse_only:$PYTHONPATH command "$@"; } # nothing but the options
run_of() { # the run $1 is my-run
    ln -sfn "$(cd runs && echo $1)" runs/my-run
    "${@:2}"
}
help() { "$@" --help; }
background() { "$@" & }
python_syntax() { python -c 'import ast, sys; ast.parse(sys.stdin.read())'; }

make_sandbox() { # clone
    mkdir -p .venv/bin configs parse_only photos pictures my_plugins scripts
    touch .venv/bin/activate
    echo "exec $(command -v python) \"\$@\"" >.venv/bin/python
    echo 'exec python -m rl "$@"' >.venv/bin/rl
    touch scripts/_install.sh
    cp "$1/scripts/quickstart.sh" scripts
    chmod +x .venv/bin/* scripts/*
    ln -s "$1/docs" docs
    for picture in photo.jpg red.png photos/b.jpg pictures/a.jpg; do
        cp docs/images/scene.png $picture
    done
    echo '{"image": "photo.jpg", "instruction": "make the sky red"}' >held_out.jsonl
    for question in "How many shapes?" "How many squares?"; do
        echo "{\"image\": \"photo.jpg\", \"instruction\": \"$question\", \"answer\": \"1\"}"
    done >my.jsonl
    echo 'Is it done? {instruction}' >question.txt
    for name in quickstart tiny_prompts; do
        cat >configs/$name.jsonnet <<END
(import '$1/configs/$name.jsonnet') + {
  engine: { type: 'transformers' },
  num_iterations: 20, prompts_per_iteration: 1, generations_per_prompt: 2,
  policy+: { lora+: { r: 4 } },
  judge+: { audit: 'off' },
  optimizer+: { warmup_iterations: 0 },
  evaluation+: { every_n_iterations: 20, num_samples: 1 },
}
END
        cp configs/$name.jsonnet .
    done
    cat >parse_only/sitecustomize.py <<'END'
import argparse
import sys


def ends(parse):
    def parsed(*arguments, **options):
        parse(*arguments, **options)
        sys.exit(0)

    return parsed


for name in ("parse_args", "parse_intermixed_args"):
    setattr(argparse.ArgumentParser, name, ends(getattr(argparse.ArgumentParser, name)))
END
    ./scripts/quickstart.sh
    for name in my-run my-edit-run mine; do ln -s quickstart runs/$name; done
    cp -r runs/quickstart runs/other
    for name in other-recipe control control-1 control-2 control-3; do ln -s other runs/$name; done
    ln -s runs/quickstart RUN
    ln -s runs/control CONTROL
    ln -s runs/control ...
    for name in CONFIG config config.jsonnet; do ln -s configs/quickstart.jsonnet $name; done
}
