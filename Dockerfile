# The image in which Beam runs the steps of a pipeline on Dataflow, Flink or Spark: Beam's own for the same versions of
# Beam and Python as where the pipeline starts, and this package with its native extension. See docs/distributed.md.
#   docker build --build-arg PYTHON=3.11 --build-arg BEAM=2.77.0 --tag IMAGE . && docker push IMAGE
ARG PYTHON=3.11
ARG BEAM=2.77.0

FROM python:${PYTHON} AS build
WORKDIR /src
COPY setup.py pyproject.toml MANIFEST.in README.md CHANGELOG.md LICENSE ./
COPY tpu_graphs tpu_graphs
COPY pipelines pipelines
COPY baselines baselines
RUN pip wheel --no-cache-dir --no-deps --wheel-dir=/wheels .

FROM apache/beam_python${PYTHON}_sdk:${BEAM}
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[gcp]" \
    && pip check \
    && TPU_GRAPHS_HLO=native python -c 'from tpu_graphs import hlo; print(hlo.implementation())'
# The entry point is that of Beam's image.
