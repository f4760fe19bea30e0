#!/usr/bin/env bash
# Sample data -> dataset -> training -> evaluation -> ranking, for both kinds, in a few minutes on two cores.
# `make quickstart` runs it; everything it writes lies in .quickstart/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

DIR=.quickstart
show() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }

rm -rf "$DIR"
show tpu-graphs sample --output="$DIR/raw"
for kind in tile layout; do
  show python pipelines/convert.py --collection="$kind:synthetic" --input="$DIR/raw/npz" --output="$DIR/data/$kind"
  show python baselines/train.py --data="$DIR/data/$kind" --out="$DIR/runs/$kind" --epochs=20 --learning_rate=3e-3
  show python baselines/evaluate.py --run="$DIR/runs/$kind" --data="$DIR/data/$kind" --split=valid
done
program=$(find "$DIR/raw/npz/layout/synthetic/test" -name '*.npz' | sort | head -n 1)
show python baselines/rank.py --run="$DIR/runs/layout" --input="$program" --top=5

cat <<EOF

Done in $SECONDS s. All of this is synthetic data with a planted cost model. To look at:
  $DIR/data/tile/manifest.json          what the conversion wrote and left out
  $DIR/runs/tile/history.csv            loss and validation metrics per epoch
  $DIR/runs/tile/valid/report.html      how good the model is: open it in a browser
  $DIR/runs/layout/valid/report.html    how good the layout model is
EOF
