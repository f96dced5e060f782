# make            the program, ./train
# make demo       a corpus of known entropy, a model trained on it, its text: under 5 minutes on 2 cores
# make demo-long  the same for half an hour, to within 3% of what is possible
# make test       every test, without a GPU and without a network
# make sanitize   the same under the address and undefined-behaviour sanitizers
# make bench      where the time of a training step goes
# make train      builds ./train: PRECISION=FP32 (default), BF16 or FP16; CUDA=auto (where there is a GPU), on, off;
#                 ARCH=native (the GPU of this machine), or sm_80, sm_90a, ...
# make emulated   the CUDA build of the trainer, run on the CPU: build/train-emulated-FP32 and so on
# make shakespeare TEXT=file    2,000 steps on Tiny Shakespeare, against nanoGPT's published loss
# make precisions the same model in each type of storage, on the demo's corpus: the losses agree within noise
# make fuzz       the readers of files, fuzzed for FUZZ_SECONDS each (needs clang)
#
# Needed: make and a C compiler (gcc or clang). Used where present: OpenMP, clang, g++, nvcc, python3.

CC ?= cc
PRECISION ?= FP32
OPTIMISE ?= -O3 -march=native
WARNINGS ?= -Wall -Wextra -Wshadow -Werror
FUZZ_SECONDS ?= 600
B ?= build
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 1)
endif

# Contracting a*b + c to one rounding, and not keeping errno and traps of mathematical functions, lets loops vectorise
# and changes no result from run to run; nothing here is -ffast-math.
CFLAGS := -std=c11 $(OPTIMISE) -ffp-contract=fast -fno-math-errno -fno-trapping-math $(WARNINGS) -pthread
OPENMP := $(shell echo 'int main(void){return 0;}' | $(CC) -fopenmp -x c - -o /dev/null 2>/dev/null && echo -fopenmp)
ifeq ($(OPENMP),)
OPENMP := -Wno-unknown-pragmas
endif
CFLAGS += $(OPENMP)
# clang warns about loops that it does not vectorise; they are right all the same.
CFLAGS += $(shell $(CC) --version 2>/dev/null | grep -q clang && echo -Wno-pass-failed)
LIBS := -lm -ldl

HEADERS := $(wildcard *.h dev/*.h data/*.h)
PRECISIONS := FP32 BF16 FP16
ifeq ($(filter $(PRECISION),$(PRECISIONS)),)
$(error PRECISION is '$(PRECISION)'; give one of $(PRECISIONS))
endif

.PHONY: all train emulated demo demo-long precisions shakespeare test sanitize bench fuzz clean
all: train

# The CUDA build where there is a GPU and nvcc.
CUDA ?= auto
ARCH ?= native
NVCC ?= nvcc
GPU_FOUND := $(shell [ $(CUDA) = auto ] && command -v $(NVCC) > /dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
ifeq ($(filter $(CUDA),auto on off),)
$(error CUDA is '$(CUDA)'; give auto, on or off)
endif
ifeq ($(if $(filter on,$(CUDA)),yes,$(GPU_FOUND)),yes)
train: $(B)/train-cuda-$(PRECISION)
	@cp -f $< $@
else
train: $(B)/train-$(PRECISION)
	@cp -f $< $@
endif

$(B):
	@mkdir -p $@

# Programs that depend on the storage type exist once per type: build/train-FP32 and so on.
$(B)/train-%: train.cu $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -x c $< -o $@ $(LIBS)
$(B)/test_train-%: test_train.cu train.cu $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -x c $< -o $@ $(LIBS)
$(B)/test_kernels-%: dev/test_kernels.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -I. $< -o $@ $(LIBS)
$(B)/bench-%: dev/bench.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -I. $< -o $@ $(LIBS)

# CUDA for a GPU.
NVCCFLAGS := -std=c++17 -O3 -arch=$(ARCH) -DLLMTRAIN_CUDA -I. -Werror all-warnings -Xcompiler -Wall,-Wextra,-fopenmp
CUDA_HEADERS := $(HEADERS) $(wildcard *.cuh)
$(PRECISIONS:%=$(B)/train-cuda-%): $(B)/train-cuda-%: train.cu $(CUDA_HEADERS) | $(B)
	$(NVCC) $(NVCCFLAGS) -DPRECISION_$* $< -o $@ -lcublasLt
$(PRECISIONS:%=$(B)/test_train-cuda-%): $(B)/test_train-cuda-%: test_train.cu train.cu $(CUDA_HEADERS) | $(B)
	$(NVCC) $(NVCCFLAGS) -DPRECISION_$* $< -o $@ -lcublasLt

# CUDA on the CPU (dev/emulator/README.md): sources are translated to C++ under build/emulated, and compiled with the
# emulator, against the headers of the CUDA toolkit or, where there is none, against stand-ins.
CXX := $(if $(filter default,$(origin CXX)),g++,$(CXX))
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v $(NVCC) 2>/dev/null)))
CUDA_INCLUDE := $(if $(wildcard $(CUDA_HOME)/include/cuda_runtime.h),-isystem $(CUDA_HOME)/include \
    -isystem $(CUDA_HOME)/include/cccl,-isystem dev/emulator/standins)
EMULATE := -std=c++17 -O2 -fopenmp -fno-strict-aliasing -ffp-contract=fast -Wall -Wextra -Wno-unknown-pragmas -pthread \
    -DLLMTRAIN_CUDA -I$(B)/emulated -I. -Idev/emulator $(CUDA_INCLUDE)
TRANSLATED := $(patsubst %,$(B)/emulated/%,llmtrain.h checkpoint.h train.cu test_train.cu $(wildcard *.cuh dev/*.cu dev/ladder.h))
EMULATOR := $(wildcard dev/emulator/*.h)
$(B)/translate: dev/emulator/translate.c base.h | $(B)
	$(CC) $(CFLAGS) -I. $< -o $@
$(B)/emulated/%: % $(B)/translate
	@mkdir -p $(@D)
	$(B)/translate $< > $@.new && mv $@.new $@
$(PRECISIONS:%=$(B)/train-emulated-%): $(B)/train-emulated-%: $(TRANSLATED) $(EMULATOR) $(HEADERS)
	$(CXX) $(EMULATE) -DPRECISION_$* -x c++ $(B)/emulated/train.cu -o $@
$(PRECISIONS:%=$(B)/test_train-emulated-%): $(B)/test_train-emulated-%: $(TRANSLATED) $(EMULATOR) $(HEADERS)
	$(CXX) $(EMULATE) -DPRECISION_$* -x c++ $(B)/emulated/test_train.cu -o $@
emulated: $(PRECISIONS:%=$(B)/train-emulated-%)
$(PRECISIONS:%=$(B)/test_cuda-emulated-%): $(B)/test_cuda-emulated-%: $(TRANSLATED) $(EMULATOR) $(HEADERS)
	$(CXX) $(EMULATE) -DPRECISION_$* -x c++ $(B)/emulated/dev/test_cuda.cu -o $@

$(B)/gemm-amx: dev/gemm.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DGEMM_EMULATE_AMX -I. $< -o $@ $(LIBS)
$(B)/%: dev/%.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -I. $< -o $@ $(LIBS)
$(B)/%: data/%.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -I. $< -o $@ $(LIBS)

TESTS := gemm test_files test_data test_corpus test_errors example $(PRECISIONS:%=test_kernels-%) $(PRECISIONS:%=test_train-%)

test: $(TESTS:%=$(B)/%) $(B)/gemm-amx $(B)/corpus $(B)/tokenize $(B)/train-FP32
	@sh dev/test.sh $(B) "$(CC)" $(TESTS)

# The same, built with the address and undefined-behaviour sanitizers, under which gcc's warnings are not reliable.
sanitize:
	@$(MAKE) --no-print-directory B=build/sanitize WARNINGS= \
	    OPTIMISE="-O1 -g -march=native -fsanitize=address,undefined -fno-sanitize-recover=all" test

demo: $(B)/train-BF16 $(B)/corpus $(B)/tokenize
	@sh dev/demo.sh $(B)

demo-long: $(B)/train-BF16 $(B)/corpus $(B)/tokenize
	@sh dev/demo.sh $(B) long

precisions: $(PRECISIONS:%=$(B)/train-%) $(B)/corpus $(B)/tokenize
	@sh dev/precisions.sh $(B)

# nanoGPT's setting for a small machine, on the text of data/tinyshakespeare.sh; fails above 1.90 nats per byte.
TEXT ?= data/shakespeare.txt
shakespeare: $(B)/train-FP32 $(B)/tokenize
	@sh dev/shakespeare.sh $(B) "$(TEXT)"

bench: $(B)/bench-FP32 $(B)/bench-BF16 $(B)/gemm
	$(B)/bench-FP32 --batch 4 --seq 64
	$(B)/bench-BF16 --batch 4 --seq 64
	$(B)/bench-FP32 --batch 4 --seq 256
	$(B)/bench-BF16 --batch 4 --seq 256
	$(B)/bench-FP32 --sweep

# libFuzzer with the address and undefined-behaviour sanitizers, one reader after the other.
FUZZ := clang -std=c11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I.
fuzz: | $(B)
	$(FUZZ) -DFUZZ_LIBFUZZER -DFUZZ_JSON dev/fuzz_files.c -o $(B)/fuzz_json -lm
	$(FUZZ) -DFUZZ_LIBFUZZER -DFUZZ_SAFETENSORS dev/fuzz_files.c -o $(B)/fuzz_safetensors -lm
	$(FUZZ) dev/fuzz_shard.c -o $(B)/fuzz_shard -lm -pthread
	$(CC) -std=c11 -O2 -DREPLAY dev/fuzz_shard.c -o $(B)/replay_shard -lm -pthread
	mkdir -p $(B)/seeds/json $(B)/seeds/safetensors $(B)/seeds/shard
	cp dev/fixtures/llama_tied.safetensors $(B)/seeds/safetensors
	$(B)/replay_shard --seeds $(B)/seeds/shard
	$(B)/fuzz_json -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 $(B)/seeds/json
	$(B)/fuzz_safetensors -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 $(B)/seeds/safetensors
	$(B)/fuzz_shard -max_len=4096 -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 $(B)/seeds/shard

clean:
	rm -rf $(B) train
