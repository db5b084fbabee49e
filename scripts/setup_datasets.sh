#!/usr/bin/env bash
# Fetches EARL's published edits, already tokenised for Emu3, into $APP__DATA_DIR (RL_DATASETS/data
# when that is not set): unpacks them, and shows which lists load and how many edits they name.
#
#   scripts/setup_datasets.sh                     everything; may take hours and some 100 GB
#   scripts/setup_datasets.sh validation earl     only what the shipped configs/sft_*.jsonnet need
#
# Sets: validation  validation_22march_256, the held-out edits
#       omniedit    train_22march_256, OmniEdit for supervised training
#       rl_100k     emu3_tokenized_rl_100k, the RL mixture of 100 k edits
#       earl        earl-datasets, every set of the paper
# Started again, it goes on where it was. HF_TOKEN and HF_ENDPOINT are heeded.
set -euo pipefail
start=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

data=${APP__DATA_DIR:-RL_DATASETS/data}
[[ $data == /* || $start == "$PWD" ]] || data=$start/$data

fetch() { # repository, folder, [files]
    local repository=$1 folder=$2
    shift 2
    if ! hf download "$repository" "$@" --repo-type dataset --local-dir "$folder"; then
        echo "setup_datasets.sh: $repository could not be fetched. What has arrived is kept:" \
            "start it again to go on. If access is refused, export HF_TOKEN." >&2
        return 1
    fi
}

main() {
    (($#)) || set -- validation omniedit rl_100k earl
    local name
    for name; do
        case $name in
            validation | omniedit | rl_100k | earl) ;;
            *)
                echo "setup_datasets.sh: no set $name;" \
                    "there are validation, omniedit, rl_100k, earl" >&2
                return 2
                ;;
        esac
    done
    scripts/_install.sh
    source .venv/bin/activate
    mkdir -p "$data"
    for name; do
        case $name in
            validation) fetch mair-lab/omniedit-got-tokenized-256 "$data" \
                validation_22march_256.tar.gz ;;
            omniedit) fetch mair-lab/omniedit-got-tokenized-256 "$data" train_22march_256.tar.gz ;;
            rl_100k) fetch rabiulawal/emu3_tokenized_rl_100k "$data" \
                emu3_tokenized_rl_100k.tar.gz ;;
            earl) fetch mair-lab/earl-datasets "$data/earl-datasets" ;;
        esac
    done
    python -m rl.commands.published_sets "$data"
}

main "$@"
