#!/usr/bin/env bash
# Fuzzes the C++ core of the HLO extractor, with AddressSanitizer and UndefinedBehaviorSanitizer.
#
#   fuzz/run.sh SECONDS [FOLDER ...]    starts from the *.pb files in the folders, by default tests/golden; what it finds
#                                       is kept in fuzz/corpus
#   fuzz/run.sh FILE                    runs one input again, such as a crash that was found
#
# It needs clang: apt-get install clang libclang-rt-dev.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

[[ $# -ge 1 ]] || { sed -n '4,6p' run.sh >&2; exit 2; }
command -v clang++ >/dev/null || { echo 'error: clang++ is missing; apt-get install clang libclang-rt-dev' >&2; exit 2; }
mkdir -p build corpus
clang++ -std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize=fuzzer,address,undefined,integer-divide-by-zero \
  -fno-sanitize-recover=all extract_fuzzer.cc ../tpu_graphs/hlo/cc/{document,messages,wire}.cc -o build/extract_fuzzer

if [[ -f $1 ]]; then
  exec build/extract_fuzzer "$1"
fi
seconds=$1
shift
mkdir -p build/seeds
find "${@:-../tests/golden}" -name '*.pb' -exec cp -f {} build/seeds/ \;
# An empty instruction of 2 bytes becomes a row of 560: arrays of the longest input stay below the limit of one malloc.
build/extract_fuzzer -max_total_time="$seconds" -max_len=400000 -len_control=20 -timeout=10 -rss_limit_mb=2048 \
  -malloc_limit_mb=128 -artifact_prefix=build/ -print_final_stats=1 corpus build/seeds 2>&1 | tail -20
