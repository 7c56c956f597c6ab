# syntax=docker/dockerfile:1.7
# ROCm image for AMD GPUs, MI300 and MI350. Run it with --device /dev/kfd --device /dev/dri --group-add video --group-add render.
#
#   docker build -f docker/rocm.Dockerfile --build-arg MILES_VERSION=$(git describe --tags --abbrev=0 | sed 's/^v//') -t miles:rocm .
#
# What was checked of this file, and what was not: docs/images.md.
FROM python:3.12.12-slim-bookworm AS build
ARG MILES_VERSION=0.1.0.dev0
ARG EXTRAS=serve,graders,ray,tensorboard
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    SETUPTOOLS_SCM_PRETEND_VERSION_FOR_MILES_RL=${MILES_VERSION}
RUN python -m venv /opt/miles
ENV PATH=/opt/miles/bin:$PATH
WORKDIR /source
COPY constraints.txt ./
ARG TORCH_INDEX=https://download.pytorch.org/whl/rocm7.1
# torch brings the Triton it was built with, and ROCm libraries of its own: the host needs the amdgpu driver.
RUN grep -v "^triton==" constraints.txt > pins.txt \
    && pip install --index-url "${TORCH_INDEX}" "$(grep "^torch==" pins.txt)+rocm7.1"
COPY pyproject.toml README.md LICENSE ./
COPY recipes ./recipes
COPY src ./src
RUN pip install -c pins.txt ".[${EXTRAS}]"

FROM python:3.12.12-slim-bookworm
# Triton compiles the launcher of each kernel with a C compiler.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc=4:12.2.0-3 "libc6-dev=2.36-*" \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 1000 miles && useradd --uid 1000 --gid miles --create-home miles
COPY --from=build /opt/miles /opt/miles
COPY --chown=miles:miles recipes /workspace/recipes
COPY --chown=miles:miles scripts /workspace/scripts
COPY docker/health_check.py /opt/miles/health_check.py
RUN install -d -o miles -g miles /workspace /workspace/runs \
    /home/miles/.cache /home/miles/.cache/huggingface /home/miles/.cache/triton
ENV PATH=/opt/miles/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/home/miles/.cache/huggingface \
    TRITON_CACHE_DIR=/home/miles/.cache/triton
USER 1000:1000
WORKDIR /workspace
EXPOSE 30000
HEALTHCHECK --interval=30s --timeout=15s --start-period=300s --retries=3 \
    CMD ["python", "/opt/miles/health_check.py"]
ENTRYPOINT ["miles"]
CMD ["doctor"]
