# make            the programs: ./train, and ./supervise, which restarts it when it dies or hangs
# make demo       a corpus of known entropy, a model trained on it, its text: under 5 minutes on 2 cores
# make demo-long  the same for half an hour, to within 3% of the entropy floor
# make demo-bpe   the demo's corpus in byte-pair tokens: loss per byte compared with a byte-level model
# make small-states  compares training with 8-bit optimizer state and no float master weights with plain AdamW
# make test       the tests, without a GPU and without a network
# make test-cpu, make test-cuda     its two halves: without CUDA, and CUDA only, run on the CPU (the second is make
#                 test-cuda-kernels, every kernel in many orders of threads, and test-cuda-runs, the rest)
# make test-more  tests that take longer, or repeat others: the emulator's own; the CUDA build in BF16 and FP16; kernels
#                 and ladders under AddressSanitizer and the race check; machine code in FP32 and FP16; clang's bits;
#                 macOS; speeds for AVX2
# make test-ranks several ranks: the transport, whole runs, faults, several machines, Slurm
# make soak       kills a run 500 times, at every point of a step and of a save: each time it resumes to the same bits
# make sanitize   make test-cpu under the address and undefined-behavior sanitizers, and the threaded parts under
#                 ThreadSanitizer (make races: only these)
# make test-posix the code that macOS runs, run on Linux: some suites without the calls that only Linux has;
#                 POSIX_TESTS=names
# make mutants    checks the tests: bugs, planted one at a time in a copy, must be found; ONLY=text, SAMPLE=10: some
# make bench      where the time of a training step goes; on a GPU if make builds for one; RECOMPUTE=block: time and
#                 memory of the levels up to that one
# make bench-peers    the same steps with PyTorch and llm.c, alternating: tokens per second, memory; LLMC=dir, ROUNDS=3,
#                 ISA=x86-64-v3
# make bounds     estimates the minimum time of each kernel of a training step on a GPU, from the machine code (needs
#                 nvcc); GPU=H100 (A100, H200, B200), MODEL=gpt2:124M BATCH=64, MEASURED=file of `bench --kernels` on a GPU
# make tour       one step of a tiny model, operation by operation: shapes, results, cost; FAMILY=llama: a Llama model
# make single     build/llmtrain_single.h: llmtrain.h and llmtrain/text/generate.h, with what they include, as one header
# make bench-checkpoint    the cost of saving and loading GPT-2 124M, compared with dd on the same disk
# make train      builds ./train: PRECISION=FP32 (default), BF16 or FP16; CUDA=auto (if there is a GPU), on, off;
#                 ARCH=native (the GPU of this machine), or sm_80, sm_90a, ...; MPI and NCCL=auto (if found), on, off
# make emulated   the CUDA build of the trainer, run on the CPU: build/train-emulated-FP32 and so on
# make sectors    memory accesses of the shipped kernels: sectors and bank conflicts, counted by the emulator, against
#                 the ideal
# make shakespeare TEXT=file    2,000 steps on Tiny Shakespeare, against nanoGPT's published loss
# make precisions the same model in each storage dtype, on the demo's corpus: the losses agree within noise
# make fuzz       fuzzes the readers of files, FUZZ_SECONDS each (needs clang)
#
# Needed: make and a C compiler (gcc or clang). Used if present: OpenMP, clang, g++, nvcc, python3.

CC ?= cc
PRECISION ?= FP32
# ISA=x86-64-v2, v3 (AVX2) or v4 (AVX-512): compiles for that instruction set, and uses no kernels for a higher one.
ISA ?= native
GEMM_KERNELS_x86-64-v2 := portable
GEMM_KERNELS_x86-64-v3 := avx2
GEMM_KERNELS_x86-64-v4 := avx512
# clang for Apple's processors has another flag for the machine's own instruction set.
TUNE := $(shell echo | $(CC) -march=$(ISA) -E -x c - > /dev/null 2>&1 && echo -march=$(ISA) || echo -mcpu=$(ISA))
# GEMM=accelerate: matmuls with Apple's Accelerate, on macOS; bits then differ from those of every other build.
GEMM ?= $(GEMM_KERNELS_$(ISA))
OPTIMIZE ?= -O3 $(TUNE)$(if $(GEMM), -DGEMM_KERNELS='"$(GEMM)"')
WARNINGS ?= -Wall -Wextra -Wshadow -Werror
FUZZ_SECONDS ?= 600
# Builds for another instruction set, or with other matmuls, have a folder of their own.
B ?= build$(patsubst %,/%,$(filter-out native,$(ISA)))$(patsubst %,/%,$(filter-out $(GEMM_KERNELS_$(ISA)),$(GEMM)))
ifeq ($(MAKELEVEL),0)
# One more job than there are processors, since tests with several processes sometimes wait.
MAKEFLAGS += -j$(shell expr 1 + "$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)")
endif

# The compiler may not contract to a fused multiply-add by itself: llmtrain/ops/arithmetic.h says why. Giving up errno and
# traps of mathematical functions lets loops vectorize and changes no result; nothing here is -ffast-math.
CFLAGS := -std=c11 $(OPTIMIZE) -ffp-contract=off -fno-math-errno -fno-trapping-math $(WARNINGS) -pthread
OPENMP := $(shell echo 'int main(void){return 0;}' | $(CC) -fopenmp -x c - -o /dev/null 2>/dev/null && echo -fopenmp)
ifeq ($(OPENMP),)  # on macOS Homebrew's (brew install libomp), if it is installed; otherwise one thread
LIBOMP := $(firstword $(wildcard /opt/homebrew/opt/libomp /usr/local/opt/libomp))
OPENMP := $(if $(LIBOMP),-Xpreprocessor -fopenmp -I$(LIBOMP)/include -L$(LIBOMP)/lib -lomp,-Wno-unknown-pragmas)
endif
CFLAGS += $(OPENMP)
# clang warns about loops that it does not vectorize; they are correct anyway.
CFLAGS += $(shell $(CC) --version 2>/dev/null | grep -q clang && echo -Wno-pass-failed)
LIBS := -lm -ldl
# Libraries that decompress texts for build/tokenize, if installed with headers: zlib for gzip, libzstd for zstd.
HAS_LIBRARY = $(shell echo 'int main(void){return 0;}' | $(CC) -include $(1) -x c - -o /dev/null $(2) 2>/dev/null && echo yes)
UNPACK := $(if $(call HAS_LIBRARY,zlib.h,-lz),-DLLMTRAIN_ZLIB -lz) $(if $(call HAS_LIBRARY,zstd.h,-lzstd),-DLLMTRAIN_ZSTD -lzstd)

HEADERS := $(wildcard *.h llmtrain/*/*.h llmtrain/*/*/*.h tools/*.h launch/*.h dev/*.h dev/bench/*.h dev/test/*.h data/*.h)
PRECISIONS := FP32 BF16 FP16
ifeq ($(filter $(PRECISION),$(PRECISIONS)),)
$(error PRECISION is '$(PRECISION)'; give one of $(PRECISIONS))
endif

.PHONY: all train supervise emulated sectors test-ranks test-cpu test-cpu-programs test-cpu-processes test-cuda test-cuda-kernels test-cuda-runs test-more test-more-cpu test-more-cuda test-cpu-only demo demo-long demo-bpe precisions small-states shakespeare test soak sanitize races test-races test-posix test-posix-suites mutants bench bounds tour single bench-checkpoint bench-peers fuzz clean
all: train supervise

# Ranks can communicate through MPI, if it is found: MPI=auto, on, off. Without it they use sockets, even under mpirun.
MPI ?= auto
MPICC := $(if $(filter off,$(MPI)),,$(shell command -v mpicc 2>/dev/null))
ifeq ($(MPI)$(MPICC),on)
$(error MPI=on, but there is no mpicc; apt-get install -y libopenmpi-dev)
endif
MPIFLAGS := $(if $(MPICC),-DLLMTRAIN_MPI $(shell $(MPICC) --showme:compile 2>/dev/null || $(MPICC) -compile_info | cut -d' ' -f2-) $(shell $(MPICC) --showme:link 2>/dev/null || $(MPICC) -link_info | cut -d' ' -f2-))

# The CUDA build, if there is a GPU and nvcc.
CUDA ?= auto
ARCH ?= native
NVCC ?= nvcc
GPU_FOUND := $(if $(filter off,$(CUDA)),,$(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes))
NVCC_FOUND := $(shell command -v $(NVCC) 2>/dev/null)
ifeq ($(filter $(CUDA),auto on off),)
$(error CUDA is '$(CUDA)'; give auto, on or off)
endif
FOR_GPU := $(filter on,$(CUDA))$(and $(GPU_FOUND),$(NVCC_FOUND))
ifneq ($(FOR_GPU),)
train: $(B)/train-cuda-$(PRECISION)
	@cp -f $< $@
else
train: $(B)/train$(if $(MPICC),-mpi)-$(PRECISION)
	@cp -f $< $@
endif

# Programs that use a model without training it, for the same precision: tools/.
TOOLS := generate evaluate plan tune
$(B)/generate $(B)/evaluate $(B)/plan: $(B)/%: $(B)/%-$(PRECISION)
	@cp -f $< $@
$(B)/tune: $(B)/tune$(if $(FOR_GPU),-cuda)-$(PRECISION)
	@cp -f $< $@

# Writes a model in the formats of other programs; it computes nothing, so there is one for all precisions.
$(B)/export: tools/export.cu $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -x c $< -o $@ $(LIBS)

$(B):
	@mkdir -p $@

# Programs that depend on the storage dtype exist once per dtype: build/train-FP32 and so on.
$(B)/train-%: train.cu $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -x c $< -o $@ $(LIBS)
$(B)/train-mpi-%: train.cu $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -x c $< -x none -o $@ $(MPIFLAGS) $(LIBS)
$(foreach t,$(TOOLS),$(PRECISIONS:%=$(B)/$t-%)): $(HEADERS) $(wildcard tools/*.cu) train.cu | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$(lastword $(subst -, ,$(@F))) -x c tools/$(firstword $(subst -, ,$(@F))).cu -o $@ $(LIBS)
$(B)/test_train-%: test_train.cu train.cu $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -I. -x c $< -o $@ $(LIBS)
$(B)/test_model-%: dev/test/test_model.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -I. $< -o $@ $(LIBS)
$(B)/test_runs-%: dev/test/test_runs.c train.cu $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -I. $< -o $@ $(LIBS)
$(B)/model_dump-%: dev/test/model_dump.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -I. $< -o $@ $(LIBS)
$(B)/test_kernels-%: dev/test/test_kernels.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -I. $< -o $@ $(LIBS)
$(B)/bench-%: dev/bench/bench.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -I. $< -o $@ $(LIBS)

# CUDA for a GPU. -arch=native asks the device; without a device nvcc would guess.
ifeq ($(CUDA)$(ARCH),onnative)
ifeq ($(GPU_FOUND),)
$(error CUDA=on, but there is no GPU to ask for its architecture; give ARCH=sm_80 (A100), sm_89, sm_90a (H100), sm_100 (B200) ...)
endif
endif
# Ranks with GPUs need NCCL.
NCCL ?= auto
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(realpath $(NVCC_FOUND)))
NCCL_FOUND := $(if $(filter off,$(NCCL)),,$(if $(wildcard $(CUDA_HOME)/include/nccl.h /usr/include/nccl.h /usr/local/include/nccl.h),yes))
ifeq ($(NCCL)$(NCCL_FOUND),on)
$(error NCCL=on, but there is no nccl.h; apt-get install -y libnccl-dev)
endif
NVCCFLAGS := -std=c++20 -O3 -DLLMTRAIN_CUDA $(NCCL_FOUND:yes=-DLLMTRAIN_NCCL) -I. -Werror all-warnings -Xcompiler -Wall,-Wextra,-fopenmp
CUDA_HEADERS := $(HEADERS) $(wildcard *.cuh llmtrain/*/*.cuh llmtrain/*/*/*.cuh)
$(PRECISIONS:%=$(B)/train-cuda-%): $(B)/train-cuda-%: train.cu $(CUDA_HEADERS) | $(B)
	$(NVCC) $(NVCCFLAGS) -arch=$(ARCH) -DPRECISION_$* $< -o $@ -lcublasLt $(NCCL_FOUND:yes=-lnccl)

$(foreach t,$(TOOLS),$(PRECISIONS:%=$(B)/$t-cuda-%)): $(CUDA_HEADERS) $(wildcard tools/*.cu) train.cu | $(B)
	$(NVCC) $(NVCCFLAGS) -arch=$(ARCH) -DPRECISION_$(lastword $(subst -, ,$(@F))) tools/$(firstword $(subst -, ,$(@F))).cu -o $@ -lcublasLt $(NCCL_FOUND:yes=-lnccl)
$(PRECISIONS:%=$(B)/bench-cuda-%): $(B)/bench-cuda-%: dev/bench/bench.c $(CUDA_HEADERS) | $(B)
	$(NVCC) $(NVCCFLAGS) -arch=$(ARCH) -DPRECISION_$* -x cu $< -o $@ -lcublasLt $(NCCL_FOUND:yes=-lnccl)

# CUDA on the CPU (dev/emulator/README.md): sources are translated to C++ under build/emulated, and compiled with the
# emulator, against the headers of the CUDA toolkit or, without one, against stand-ins.
CXX := $(if $(filter default,$(origin CXX)),g++,$(CXX))
CUDA_INCLUDE := $(if $(wildcard $(CUDA_HOME)/include/cuda_runtime.h),-isystem $(CUDA_HOME)/include \
    -isystem $(CUDA_HOME)/include/cccl)
EMULATE := -std=c++20 -fno-strict-aliasing -ffp-contract=fast -Wall -Wextra -Werror -Wno-unknown-pragmas -pthread \
    -DLLMTRAIN_CUDA -DLLMTRAIN_NCCL -I$(B)/emulated -I. -Idev/emulator $(or $(CUDA_INCLUDE),-isystem dev/emulator/standins)
EMULATOR := $(wildcard dev/emulator/*.h dev/emulator/standins/*.h)
TRANSLATED := $(patsubst %,$(B)/emulated/%,$(wildcard *.h *.cuh *.cu \
    $(foreach d,llmtrain/* llmtrain/*/*,$(d)/*.h $(d)/*.cuh) tools/*.h dev/*.cu dev/ladder.h dev/bench/*.h dev/gpu/*.cu dev/test/*.cu tools/tune.cu))
EMULATED_NEEDS := $(TRANSLATED) $(EMULATOR) $(HEADERS)
.SECONDARY: $(TRANSLATED)
$(B)/translate: dev/emulator/translate.cpp | $(B)
	$(CXX) -std=c++20 -O1 $(WARNINGS) $< -o $@
$(B)/emulated/%: % $(B)/translate
	@mkdir -p $(@D)
	@$(B)/translate $< > $@.new && mv $@.new $@
# The test contains the whole trainer, and acts as the trainer under this name, so that it is not compiled twice.
$(PRECISIONS:%=$(B)/train-emulated-%): $(B)/train-emulated-%: $(B)/test_train-emulated-%
	@ln -f $< $@
$(PRECISIONS:%=$(B)/test_train-emulated-%): $(B)/test_train-emulated-%: $(EMULATED_NEEDS)
	$(CXX) -O1 -fopenmp $(EMULATE) -DPRECISION_$* -x c++ $(B)/emulated/test_train.cu -o $@
$(PRECISIONS:%=$(B)/test_model-emulated-%): $(B)/test_model-emulated-%: dev/test/test_model.c $(EMULATED_NEEDS)
	$(CXX) -O1 -fopenmp $(EMULATE) -DPRECISION_$* -x c++ $< -o $@
$(B)/bench-emulated-BF16: dev/bench/bench.c $(EMULATED_NEEDS)
	$(CXX) -O0 -fopenmp $(EMULATE) -DPRECISION_BF16 -x c++ $< -o $@
emulated: $(PRECISIONS:%=$(B)/train-emulated-%)

# The test of all kernels, and the ladders as one program, as build/emulated-BUILD-PRECISION-NAME: plain, under the
# sanitizers, and with the race check. The last two builds check memory accesses, which are the same for both 16-bit
# dtypes; for ladders one dtype is enough. make test has the kernels in two dtypes, and in one with the race check; make
# test-more has the rest.
LADDERS := adamw attention_backward attention_forward classifier embedding exact_add gelu global_norm layernorm matmul muon optimizers qk_norm rope
EMULATED := $(addprefix $(B)/emulated-,plain-FP32-test_cuda plain-BF16-test_cuda plain-BF16-ladders race-BF16-test_cuda)
EMULATED_MORE := $(addprefix $(B)/emulated-,plain-FP32-ladders plain-FP16-test_cuda plain-FP16-ladders asan-BF16-test_cuda \
    $(foreach b,asan race,$b-FP32-test_cuda $b-BF16-ladders))
TYPE_AND_SOURCE = -DPRECISION_$(word 1,$(subst -, ,$*)) -x c++ \
    $(B)/$(if $(filter %-test_cuda,$*),emulated/dev/test/)$(word 2,$(subst -, ,$*)).cu
$(EMULATED) $(EMULATED_MORE): $(EMULATED_NEEDS) $(B)/ladders.cu
$(B)/emulated-plain-%:
	$(CXX) -O1 -fopenmp $(EMULATE) $(TYPE_AND_SOURCE) -o $@
# Optimizing the code that the sanitizers add takes longer than running it.
$(B)/emulated-asan-%:
	$(CXX) -O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all $(EMULATE) $(TYPE_AND_SOURCE) -o $@
RACE_OPTIONS := -g1
define RACE_BUILD
$(CXX) -O1 -fno-pie $(RACE_OPTIONS) -DEMULATE_RACE -fsanitize=thread $(EMULATE) -c $(TYPE_AND_SOURCE) -o $@.o
$(CXX) -no-pie $@.o -o $@ -ldl
@rm $@.o
endef
$(B)/emulated-race-%:
	$(RACE_BUILD)
# The same, for counting memory accesses of kernels: structs must stay whole, which makes it run half as long again, and
# lines of inlined functions are reported.
$(B)/emulated-count-%: RACE_OPTIONS := -g -fno-tree-sra
$(B)/emulated-count-%:
	$(RACE_BUILD)
COUNTED := $(foreach t,BF16 FP32,$(B)/emulated-count-$t-ladders $(B)/emulated-count-$t-test_cuda)
$(COUNTED): $(EMULATED_NEEDS) $(B)/ladders.cu
sectors: $(COUNTED)
	@for type in BF16 FP32; do \
	    echo "$$type:"; sh dev/gpu/sectors.sh $(B) $$type > $(B)/sectors-$$type.txt; status=$$?; cat $(B)/sectors-$$type.txt; \
	    [ $$status -eq 0 ] || exit 1; done
# All ladders as one source, since most of the compile time goes into their common headers. The program's first argument
# names the ladder: build/emulated-plain-BF16-ladders adamw --parameters 1027.
$(B)/ladders.cu: Makefile | $(B)
	@{ echo '#include "kernels.cuh"'; echo '#include "dev/ladder.h"'; echo '#define main ladder_main'; \
	  $(foreach l,$(LADDERS),echo 'namespace ladder_of_$(l) {'; echo '#include "dev/$(l).cu"'; echo '}';) \
	  echo '#undef main'; echo 'int main(int argc, char** argv) {'; \
	  $(foreach l,$(LADDERS),echo '    if (argc > 1 && strcmp(argv[1], "$(l)") == 0)'; \
	    echo '        return ladder_of_$(l)::ladder_main(argc - 1, argv + 1);';) \
	  echo '    puts("usage: ladders NAME FLAG...; NAME is one of: $(LADDERS)");'; echo '    return 2;'; echo '}'; } > $@
$(B)/test_cublaslt $(B)/test_nccl $(B)/test_tune: $(B)/%: dev/emulator/%.cu $(EMULATED_NEEDS)
	@mkdir -p $(B)/emulated/dev/emulator
	$(B)/translate $< > $(B)/emulated/$<
	$(CXX) $(if $(filter %tune,$@),-O0,-O1) -fopenmp $(EMULATE) -x c++ $(B)/emulated/$< -o $@

# All of this without a warning: resources.sh compiles the shipped kernels for sm_80, sm_90a and sm_100 and checks their
# machine code; nvcc-code compiles sources with other kernels, for all three from the virtual architecture of sm_80;
# nvcc-syntax checks the syntax of the rest, for sm_80 and sm_90a. Host code does not run here, so it is not optimized.
# make test checks the syntax, and the machine code of BF16; make test-more does the rest.
NVCC_CHECK := $(NVCC) $(filter-out -O3,$(NVCCFLAGS)) -c -o /dev/null
NVCC_SOURCE = -DPRECISION_$(word 1,$(subst -, ,$*)) \
    -x cu $(wildcard $(foreach d,. dev/emulator dev/test tools $(B),$(d)/$(word 2,$(subst -, ,$*)).cu) $(foreach d,bench test,dev/$(d)/$(word 2,$(subst -, ,$*)).c))
COMPILED := $(if $(NVCC_FOUND),$(patsubst %,$(B)/nvcc-%.ok,syntax-FP32-test_train $(foreach t,train model runs,syntax-BF16-test_$t) syntax-BF16-test_nccl syntax-BF16-bench $(TOOLS:%=syntax-BF16-%) \
    syntax-BF16-ladders) $(B)/resources-BF16.txt)
COMPILED_MORE := $(if $(NVCC_FOUND),$(patsubst %,$(B)/nvcc-%.ok,$(foreach t,train model runs,syntax-FP16-test_$t) syntax-FP32-ladders code-BF16-ladders code-BF16-test_emulator) \
    $(B)/resources-FP32.txt $(B)/resources-FP16.txt)
$(filter %.ok,$(COMPILED) $(COMPILED_MORE)): $(CUDA_HEADERS) dev/bench/bench.c dev/test/test_model.c dev/test/test_runs.c $(wildcard *.cu dev/*.cu dev/test/*.cu dev/emulator/*.cu tools/*.cu) $(B)/ladders.cu
$(B)/nvcc-syntax-%.ok:
	$(NVCC_CHECK) -fdevice-syntax-only $(foreach a,80 90a,-gencode arch=compute_$(a),code=sm_$(a)) $(NVCC_SOURCE)
	@touch $@
$(B)/nvcc-code-%.ok:
	$(NVCC_CHECK) $(foreach a,80 90a 100,-gencode arch=compute_80,code=sm_$(a)) $(NVCC_SOURCE)
	@touch $@
# Block sizes are the same in both 16-bit builds; those of FP32 come from __launch_bounds__.
$(B)/launches-%: $(EMULATED_NEEDS)
	$(CXX) -O0 -fopenmp $(EMULATE) -DPRECISION_$* -x c++ $(B)/emulated/dev/gpu/launches.cu -o $@
$(B)/resources-%.txt: dev/gpu/resources.sh dev/gpu/machine_code.py dev/test/test_cuda.cu $(B)/launches-BF16 $(CUDA_HEADERS) | $(B)
	@NVCC=$(NVCC) OUT=$(B)/machine-code-$*.jsonl LAUNCHES=$(if $(filter FP32,$*),,$(B)/launches-BF16) \
	    sh dev/gpu/resources.sh $* > $@.new || { tail -n 20 $@.new; exit 1; }
	@mv $@.new $@ && echo "$@: $$(grep '^skipped' $@)$$(tail -n 1 $@)"

# The same bits on every processor: golden for each instruction set that this machine can run, with each compiler, at
# different optimization levels; and checks of the GEMM kernels that this machine would not choose by itself.
MACHINE := $(shell $(CC) -march=native -dM -E -x c /dev/null 2>/dev/null)
# gcc knows these names since version 11, clang since 12.
NAMED := $(shell echo | $(CC) -march=x86-64-v2 -E -x c - > /dev/null 2>&1 && echo yes)
ISAS := $(if $(NAMED),$(if $(findstring __SSE4_2__,$(MACHINE)),x86-64-v2) $(if $(findstring __AVX2__,$(MACHINE)),x86-64-v3) \
    $(if $(findstring __AVX512VL__,$(MACHINE)),x86-64-v4))
LESSER_ISAS := $(filter-out %-v4,$(ISAS))
ISA_TESTS := $(ISAS:%=$(B)/golden-%) $(LESSER_ISAS:%=$(B)/gemm-%) \
    $(if $(shell command -v aarch64-linux-gnu-gcc 2>/dev/null),$(B)/golden-aarch64 $(B)/gemm-aarch64)
STRICT := -std=c11 -ffp-contract=off -fno-math-errno -fno-trapping-math -I.
FOR_ISA = $(CC) $(STRICT) -march=x86-64-$* -DGEMM_KERNELS='"$(GEMM_KERNELS_x86-64-$*)"' $(OPENMP) $< -o $@ -pthread $(LIBS)
$(B)/golden-x86-64-%: dev/test/golden.c $(HEADERS) | $(B)
	$(FOR_ISA) $(if $(filter v3,$*),-O2,-O1)
$(B)/gemm-x86-64-%: dev/bench/gemm.c $(HEADERS) | $(B)
	$(FOR_ISA) -O3
$(B)/bench-x86-64-%: dev/bench/bench.c $(HEADERS) | $(B)
	$(FOR_ISA) -O3
$(B)/golden-clang: dev/test/golden.c $(HEADERS) | $(B)
	clang $(STRICT) -O3 -march=native -Wno-unknown-pragmas $< -o $@ -pthread $(LIBS)
$(B)/golden-aarch64: dev/test/golden.c $(HEADERS) | $(B)
	aarch64-linux-gnu-gcc $(STRICT) -O1 -static -Wno-unknown-pragmas $< -o $@ -pthread $(LIBS)
# The kernel with BFMMLA, which qemu supports.
$(B)/gemm-aarch64: dev/bench/gemm.c $(HEADERS) | $(B)
	aarch64-linux-gnu-gcc $(STRICT) -O2 -static -Wno-unknown-pragmas -DGEMM_CHECK_EVERY=17 $< -o $@ -pthread $(LIBS)
$(B)/golden-%: dev/test/golden.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -I. $< -o $@ $(LIBS)

$(B)/gemm-amx: dev/bench/gemm.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DGEMM_EMULATE_AMX -I. $< -o $@ $(LIBS)
$(B)/%: dev/bench/%.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -I. $< -o $@ $(LIBS)
$(B)/%: examples/%.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -I. $< -o $@ $(LIBS)
$(B)/%: dev/test/%.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -I. $< -o $@ $(LIBS)
$(B)/%: dev/peers/%.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -I. $< -o $@ $(LIBS)
$(B)/%: data/%.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -I. $< -o $@ $(LIBS)
$(B)/tokenize: data/tokenize.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -I. $< -o $@ $(UNPACK) $(LIBS)
$(B)/test_text: dev/test/test_text.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -I. $< -o $@ $(UNPACK) $(LIBS)
$(B)/%: launch/%.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -I. $< -o $@ $(LIBS)
$(B)/test_supervise: launch/supervise.c | $(B)/supervise
supervise: $(B)/supervise
	@cp -f $< $@

# Tests that compute little take longer to optimize than to run. The code that they share with the trainer is tested at
# full optimization by golden-FP32, test_kernels-FP32, and all tests that run train-FP32 and train-BF16.
$(addprefix $(B)/,test_convert test_trace test_evaluate test_plan test_optimizers test_optimizers_matrix first golden-BF16 \
    test_kernels-BF16 test_kernels-FP16 $(foreach t,train model runs,$(PRECISIONS:%=test_$t-%))): CFLAGS := $(CFLAGS:-O3=-O1)

TESTS := gemm test_files test_offload test_data test_tokenizer test_template test_convert test_gguf test_evaluate test_plan test_text test_corpus test_errors test_trace test_optimizers test_optimizers_matrix test_comm test_zero test_seams test_ranks test_supervise soak first $(foreach t,FP32 BF16,test_kernels-$t test_train-$t test_model-$t test_runs-$t)
# For tests of processes that connect, train, die and stop.
RANKS_TESTS := $(B)/test_comm $(B)/test_zero $(B)/test_ranks $(B)/weights_hash $(B)/train-FP32 $(B)/train-BF16 $(B)/generate-FP32 $(B)/export $(B)/evaluate-FP32 $(B)/plan-BF16 $(B)/corpus $(B)/tokenize \
    $(if $(MPICC),$(B)/train-mpi-FP32)
CPU_TESTS := $(TESTS:%=$(B)/%) $(B)/golden-FP32 $(B)/golden-BF16 $(if $(filter build,$(B)),$(ISA_TESTS)) $(B)/gemm-amx $(B)/bench-FP32 $(B)/llmtrain_single.h $(RANKS_TESTS)
KERNELS_TESTS := $(EMULATED) $(B)/bench-emulated-BF16
# The programs for comparing the trainers of these dtypes.
TRAINERS_OF = $(addprefix $(B)/,corpus tokenize weights_hash $(foreach p,$(1),train-$p train-emulated-$p test_train-emulated-$p test_model-emulated-$p))
RUNS_TESTS := $(call TRAINERS_OF,FP32) $(addprefix $(B)/,test_cublaslt test_nccl launches-BF16) $(COMPILED)

# With a C++ compiler, all of CUDA too. The parts run in parallel; tests that measure times run afterwards, one by one.
CXX_FOUND := $(shell command -v $(CXX) 2>/dev/null)
test: $(if $(CXX_FOUND),test-cpu test-cuda,test-cpu-only)
	@sh dev/test/test.sh alone $(B) "$(CC)" overlap cliffs
	@cat $(patsubst %,$(B)/test-%.sum,cpu-programs cpu-processes cuda-kernels cuda-runs alone) 2>/dev/null | awk '{ p += $$1; f += $$3 } END { print p " passed, " f " failed in all"; exit f > 0 }'

# Processes that wait for each other run while other tests compute.
PROCESS_TESTS := test_comm test_ranks test_supervise soak
test-cpu: test-cpu-programs test-cpu-processes
test-cpu-programs: $(CPU_TESTS)
	@sh dev/test/test.sh cpu-programs $(B) "$(CC)" compilers inlined $(filter-out $(PROCESS_TESTS),$(TESTS)) golden tour single floors
test-cpu-processes: $(CPU_TESTS)
	@sh dev/test/test.sh cpu-processes $(B) "$(CC)" $(PROCESS_TESTS) same_weights machines gpu_check

test-cpu-only: test-cpu
	@rm -f $(B)/test-cuda-*.sum
	@echo "skipped the tests of CUDA: there is no $(CXX); apt-get install -y g++"

test-cuda: test-cuda-kernels test-cuda-runs
TEST_EMULATED = sh dev/test/test_emulated.sh $(@:test-cuda-%=%) $(B) "$(CUDA_INCLUDE)" $(if $(COMPILED),yes,no) "$(LADDERS)"
test-cuda-kernels: $(KERNELS_TESTS)
	@$(TEST_EMULATED) $(EMULATED)
test-cuda-runs: $(RUNS_TESTS)
	@$(TEST_EMULATED)
test-more-cuda: $(EMULATED_MORE) $(call TRAINERS_OF,BF16 FP16) $(addprefix $(B)/,emulated-plain-BF16-ladders test_tune) $(COMPILED_MORE)
	@sh dev/test/test_emulated.sh more $(B) "$(CUDA_INCLUDE)" $(if $(COMPILED),yes,no) "$(LADDERS)" $(EMULATED_MORE)
MORE_CPU := test_kernels-FP16 test_train-FP16 test_model-FP16 test_runs-FP16 $(if $(shell command -v clang 2>/dev/null),golden-clang)
test-more-cpu: $(MORE_CPU:%=$(B)/%)
	@sh dev/test/test.sh more $(B) "$(CC)" $(MORE_CPU) macos
test-more: test-more-cpu $(if $(CXX_FOUND),test-more-cuda) $(LESSER_ISAS:%=$(B)/bench-%)
	@sh dev/test/test.sh more-alone $(B) "$(CC)" $(LESSER_ISAS:%=cliffs-%)

# At least 500 kills of a run, at every point and at any time; each time it resumes to the same bits. make test runs a
# sample.
soak: $(B)/soak $(B)/train-FP32
	$(B)/soak --train $(B)/train-FP32 --kills 500

# A part of test-cpu.
test-ranks: $(RANKS_TESTS)
	@sh dev/test/test.sh ranks $(B) "$(CC)" test_comm test_zero test_ranks machines

# test-cpu, built with the address and undefined-behavior sanitizers, with which gcc's warnings are not reliable.
sanitize:
	@$(MAKE) --no-print-directory B=build/sanitize WARNINGS= \
	    OPTIMIZE="-O1 -g1 -march=native -fsanitize=address,undefined -fno-sanitize-recover=all" test-cpu
	@$(MAKE) --no-print-directory races

# The loader, offloading, the saver and the transport under ThreadSanitizer, without OpenMP, whose barriers it does not
# know.
races:
	@TSAN_OPTIONS=exitcode=66 $(MAKE) --no-print-directory B=build/races WARNINGS= OPENMP=-Wno-unknown-pragmas \
	    OPTIMIZE="-O1 -g1 -march=native -fsanitize=thread -Wno-tsan" test-races
test-races: $(addprefix $(B)/,test_data test_offload test_comm train-FP32 tokenize)
	@sh dev/test/test.sh races $(B) "$(CC)" test_data test_offload test_comm races

# The code that other systems run instead of calls that only Linux has: llmtrain/base/system.h.
POSIX_TESTS ?= test_files test_offload test_data test_comm test_supervise test_errors test_ranks test_train-FP32 test_model-FP32 test_runs-FP32
test-posix:
	@$(MAKE) --no-print-directory B=build/posix MPI=off WARNINGS= OPTIMIZE="-O1 $(TUNE) -DLLMTRAIN_POSIX_ONLY" test-posix-suites
test-posix-suites: $(addprefix $(B)/,$(POSIX_TESTS) supervise train-FP32 train-BF16 generate-FP32 corpus tokenize)
	@sh dev/test/test.sh posix $(B) "$(CC)" posix $(POSIX_TESTS)

mutants: | $(B)
	@sh dev/test/mutants.sh $(B) "$(ONLY)" "$(SAMPLE)"

demo: $(B)/train-FP32 $(B)/generate-FP32 $(B)/corpus $(B)/tokenize
	@sh dev/demos/demo.sh $(B)

demo-long: $(B)/train-FP32 $(B)/generate-FP32 $(B)/corpus $(B)/tokenize
	@sh dev/demos/demo.sh $(B) long

# The demo's corpus and settings with byte-pair tokens.
demo-bpe: $(B)/train-FP32 $(B)/generate-FP32 $(B)/corpus $(B)/tokenize
	@sh dev/demos/demo_bpe.sh $(B)

precisions: $(PRECISIONS:%=$(B)/train-%) $(B)/corpus $(B)/tokenize
	@sh dev/demos/precisions.sh $(B)

small-states: $(B)/train-BF16 $(B)/corpus $(B)/tokenize
	@sh dev/demos/small_states.sh $(B)

# nanoGPT's settings for a small machine, on the text of data/tinyshakespeare.sh; fails above 1.90 nats per byte.
TEXT ?= data/shakespeare.txt
shakespeare: $(B)/train-FP32 $(B)/tokenize
	@sh dev/demos/shakespeare.sh $(B) "$(TEXT)"

ifneq ($(FOR_GPU),)  # ten seconds of steps on a large GPU, whose clocks need that time to settle
bench: $(B)/bench-cuda-BF16
	$(B)/bench-cuda-BF16 --batch 64 --seq 1024 --steps 80 $(if $(RECOMPUTE),--recompute $(RECOMPUTE),--kernels $(B)/kernels.txt)
else ifdef RECOMPUTE
bench: $(B)/bench-FP32 $(B)/bench-BF16
	$(B)/bench-FP32 --batch 4 --seq 256 --recompute $(RECOMPUTE)
	$(B)/bench-BF16 --batch 4 --seq 256 --recompute $(RECOMPUTE)
else
bench: $(B)/bench-FP32 $(B)/bench-BF16 $(B)/gemm
	$(B)/bench-FP32 --batch 4 --seq 64
	$(B)/bench-BF16 --batch 4 --seq 64
	$(B)/bench-FP32 --batch 4 --seq 256
	$(B)/bench-BF16 --batch 4 --seq 256
	$(B)/bench-FP32 --sweep
endif

# Compared with PyTorch, if it is installed, and with a checkout of llm.c: make bench-peers LLMC=dir
ROUNDS ?= 3
bench-peers: $(B)/bench-FP32 $(B)/bench-BF16
	@python3 dev/bench/peers_cpu.py --build $(B) --isa $(ISA) --rounds $(ROUNDS) $(if $(LLMC),--llmc "$(LLMC)")

FAMILY ?= gpt2
tour: $(B)/bench-FP32
	@$(B)/bench-FP32 --tour --model $(FAMILY):tiny --batch 4 --seq 32 --threads 1

# With sectors and bank conflicts, if make sectors has counted them.
GPU ?= H100
BOUNDS := $(if $(MODEL),$(MODEL)=$(or $(BATCH),64),gpt2:124M=64 gpt2:1558M=32)
bounds: $(B)/resources-BF16.txt
	@for step in $(BOUNDS); do \
	    python3 dev/gpu/bounds.py --launches $(B)/launches-BF16 --code $(B)/machine-code-BF16.jsonl --gpu $(GPU) \
	        --model $${step%=*} --batch $${step#*=} $(if $(MEASURED),--measured "$(MEASURED)") \
	        $(patsubst %,--sectors %,$(wildcard $(B)/sectors-BF16.jsonl)) || exit 1; done

single: $(B)/llmtrain_single.h
$(B)/llmtrain_single.h: dev/single.sh $(CUDA_HEADERS) | $(B)
	@sh dev/single.sh > $@.new && mv $@.new $@ && echo "$@: $$(wc -l < $@) lines"

bench-checkpoint: $(B)/checkpoint_cost
	$(B)/checkpoint_cost --dir $(B)

# libFuzzer with the address and undefined-behavior sanitizers, one reader after the other.
FUZZ := clang -std=c11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -DFUZZ_LIBFUZZER -I.
READERS := JSON SAFETENSORS SHARD CONVERT TOKENIZER CHOICES SCORES TEMPLATE TEXT
fuzz: | $(B)
	for reader in $(READERS); do $(FUZZ) -DFUZZ_$$reader dev/test/fuzz.c -o $(B)/fuzz_$$reader $(UNPACK) -lm -pthread || exit 1; done
	$(CC) -std=c11 -O2 -I. -DFUZZ_SHARD dev/test/fuzz.c -o $(B)/seeds_of_shards -lm -pthread
	mkdir -p $(READERS:%=$(B)/seeds/%)
	cp dev/test/fixtures/llama_tied.safetensors $(B)/seeds/SAFETENSORS
	cp dev/test/fixtures/templates.json $(B)/seeds/TEMPLATE
	for model in dev/test/fixtures/models/*; do \
	    { cat $$model/config.json; printf '\000\000'; cat $$model/model.safetensors; } \
	    > $(B)/seeds/CONVERT/$${model##*/} 2> /dev/null; done
	cd dev/test/fixtures/models/llama && { cat config.json; printf '\000'; sed 's/: "model.*tensors"/: "a"/' *.index.json; \
	    printf '\000'; cat model-00001-of-*.safetensors; } > $(CURDIR)/$(B)/seeds/CONVERT/index
	$(B)/seeds_of_shards $(B)/seeds/SHARD
	cd dev/test/fixtures/tokenizers && for file in [!i]*.json ranks.tiktoken; do \
	    { cat $$file; printf '\000{"eos_token":"</s>"}\000Hello the world 12<s>\303\251\314\201 \342\226\201 \377'; } \
	    > $(CURDIR)/$(B)/seeds/TOKENIZER/$$file; done; \
	    { printf '#'; cat gpt2/encoder.json; printf '\000'; cat gpt2/vocab.bpe; printf '\000it is a text'; } \
	    > $(CURDIR)/$(B)/seeds/TOKENIZER/gpt2
	printf '{"ctx": "a b ", "endings": ["c", "d"], "label": "1"}\n{"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}\n' > $(B)/seeds/CHOICES/forms
	printf 'evaluation 0000000000000001\nitem 0 1.5 2 3\nitem 1 1 2 3 4 5 6\n.item 3\n' > $(B)/seeds/SCORES/items
	cp dev/test/fixtures/bpe_training.json README.md $(B)/seeds/TEXT
	printf '{"text": "a\\u00e9 b"}\n\n{"text": "c"}\n' | tee $(B)/seeds/TEXT/lines | gzip > $(B)/seeds/TEXT/lines.gz
	for reader in $(READERS); do $(B)/fuzz_$$reader -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 \
	    $$([ $$reader = SHARD ] && echo -max_len=4096) $(B)/seeds/$$reader || exit 1; done

clean:
	rm -rf $(B) train supervise
