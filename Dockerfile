# SPDX-License-Identifier: Apache-2.0
# docker build -t torchbeast .                      learner and servers, with torch's CUDA libraries
# docker build -t torchbeast-env --target env .     environment servers alone: no torch
# docker build -t torchbeast-cpu --build-arg PIP_EXTRA_INDEX_URL=INDEX .
#                                                   for CPUs, gigabytes smaller; INDEX is that of the
#                                                   CPU builds, which PyTorch's install page names

ARG PYTHON=3.12

# The wheel of libtorchbeast and nest: the compilers stay behind in this stage.
FROM python:${PYTHON}-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends \
        g++ libgrpc++-dev libprotobuf-dev make pkg-config protobuf-compiler-grpc \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in LICENSE ./
COPY csrc csrc
COPY libtorchbeast libtorchbeast
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm AS env
WORKDIR /torchbeast
COPY requirements-env.txt ./
RUN pip install --no-cache-dir -r requirements-env.txt
COPY *.py ./
COPY beast beast
COPY libtorchbeast libtorchbeast
COPY examples examples
# Within the container alone. For others: an address, and a token or certificates (README.md).
CMD ["python", "polybeast_env.py"]

FROM env AS learner
# Read by pip. A build for CPUs counts as newer than the one with CUDA of the same version.
ARG PIP_EXTRA_INDEX_URL=
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt
# What the compiled part links; of the same release of Debian as the stage that built it.
RUN apt-get update && apt-get install -y --no-install-recommends libgrpc++1.51 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-deps --target /torchbeast --upgrade /wheels/*.whl
CMD ["python", "polybeast.py", "--savedir", "/logs"]
