#!/usr/bin/env bash
# Fetches EARL's published edits, already tokenised for Emu3, into $APP__DATA_DIR (default
# RL_DATASETS/data), unpacks them and prints their lists. `rl check CONFIG` reads a config's data.
#
#   scripts/setup_datasets.sh                     everything; may take hours and some 100 GB
#   scripts/setup_datasets.sh validation earl     only what the shipped configs/sft_*.jsonnet need
#
# Sets: validation  validation_22march_256, the held-out edits
#       omniedit    train_22march_256, OmniEdit for supervised training
#       rl_100k     emu3_tokenized_rl_100k, the RL mixture of 100 k edits
#       earl        earl-datasets, every set of the paper
# A second start continues an interrupted one. HF_TOKEN and HF_ENDPOINT are used if set.
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

unpack() { # archive; once, into its folder, or into a new one if the archive has no top folder
    local archive=$1 folder mark first
    folder=$(dirname "$archive") mark=$(dirname "$archive")/.$(basename "$archive").unpacked
    [[ ! -f $mark || $(<"$mark") != "$(stat -c %s "$archive")" ]] || return 0
    echo "unpacking $archive"
    first=$(tar -tf "$archive" 2>/dev/null | grep -m 1 -vx '\./' || true)
    first=${first#./}
    case ${first%%/*} in
        list | feature | train | validation | val | test)
            folder=$folder/$(basename "$archive" | sed -E 's/\.(tar|tgz).*//')
            ;;
    esac
    mkdir -p "$folder"
    # GNU tar extracts nothing outside of the folder.
    if ! tar -xf "$archive" -C "$folder" --no-same-owner; then
        echo "setup_datasets.sh: $archive cannot be unpacked; delete it and fetch it again" >&2
        return 1
    fi
    stat -c %s "$archive" >"$mark"
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
    # Without `feature` folders, which hold millions of files.
    local finding=(find "$data" -mindepth 1 '(' -name feature -o -name '.?*' ')' -prune -o -type f)
    while IFS= read -r -d '' archive; do
        unpack "$archive"
    done < <("${finding[@]}" -regex '.*\.\(tar\|tar\.gz\|tgz\)' -print0)
    "${finding[@]}" -name tokenized_datalist.json -print
}

main "$@"
