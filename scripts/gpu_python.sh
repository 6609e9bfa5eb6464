#!/bin/sh
# Writes an executable OUT that stands for the Python of an engine whose packages lie in the folder SITE, beside those
# of the host's python3: an agent's `interpreter`. For hosts where an engine is unpacked rather than installed.
# usage: scripts/gpu_python.sh vllm|sglang SITE OUT
set -eu
engine=$1 site=$2 out=$3
case $engine in
vllm) settings="VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_WORKER_MULTIPROC_METHOD=fork" ;;
sglang) settings="TVM_FFI_CACHE_DIR=$site/jit" ;;
*) echo "unknown engine $engine" >&2; exit 2 ;;
esac
python=$(command -v python3)
cat >"$out" <<END
#!/bin/sh
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH=$site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 $settings
exec $python "\$@"
END
chmod 755 "$out"
