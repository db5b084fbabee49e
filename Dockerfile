# This clone with its locked packages, in one of two images (docs/container.md):
#
#   docker build -t vlm-edit-rl:cpu .                                        the tiny systems
#   docker build -t vlm-edit-rl:cuda --build-arg LOCK=requirements.lock .    GPUs: driver >= 580
#
# Both start from plain Debian: the packages of requirements.lock bring CUDA's libraries, and the
# NVIDIA container toolkit brings the driver's from the host. Debian 13's Python is 3.13.
FROM debian:trixie-slim
ARG LOCK=requirements-cpu.lock
# Whoever owns the folders that you mount: --build-arg UID=$(id -u)
ARG UID=1000

# Triton compiles with a C compiler and Python's headers when a run starts, also in the container;
# vLLM for CPUs loads libnuma, and without it fails at an operator of its own.
RUN apt-get update && \
    apt-get install -y --no-install-recommends \
    build-essential ca-certificates libnuma1 python3.13-dev python3.13-venv && \
    rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid "$UID" rl && \
    install -d -o rl -g rl /vlm-edit-rl /vlm-edit-rl/runs /home/rl/.cache
USER rl
WORKDIR /vlm-edit-rl

# Without this REQUIREMENTS, scripts that install first would look for a GPU, which a build lacks.
ENV REQUIREMENTS=$LOCK APP__BASE_EXP_DIR=/vlm-edit-rl/runs \
    PATH=/vlm-edit-rl/.venv/bin:$PATH

# Only what the installer reads, so that a change of the code does not install everything again. It
# links the clone into .venv only if the packages have a file.
COPY --chown=rl pyproject.toml README.md LICENSE requirements-cpu.lock requirements.lock ./
COPY --chown=rl scripts/_install.sh scripts/
RUN mkdir rl tiny_world configs && touch rl/__init__.py tiny_world/__init__.py && \
    UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 scripts/_install.sh
COPY --chown=rl . .

# The cache has the hub's models and data (HF_HOME), and what vLLM and FlashInfer compile.
VOLUME /vlm-edit-rl/runs /home/rl/.cache
CMD ["rl", "help"]
