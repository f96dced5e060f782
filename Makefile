# make, make help: the programs, and a list of everything else. What tests and developers need is in dev/build.mk.
# Needed: make and a C compiler (gcc or clang). Used if present: OpenMP, clang, g++, nvcc, python3.

##@ Variables, as in `make PRECISION=BF16 CUDA=off`
## PRECISION=FP32: storage dtype of parameters and activations: FP32, BF16 or FP16
PRECISION ?= FP32
## CUDA=auto: build for a GPU: auto (if there is one), on, off
CUDA ?= auto
## ARCH=native: for the GPU of this machine, or sm_80 (A100), sm_90a (H100) ...; for several: "80 86 89 90a 100 120"
ARCH ?= native
## NCCL=auto: several GPUs need it: auto (if found), on, off
NCCL ?= auto
## MPI=auto: ranks may communicate through it instead of sockets: auto (if found), on, off
MPI ?= auto
## CC=cc: the C compiler; NVCC=nvcc: the CUDA compiler
CC ?= cc
NVCC ?= nvcc
## ISA=native: for this processor, or x86-64-v2, x86-64-v3 (AVX2), x86-64-v4 (AVX-512)
ISA ?= native
## GEMM=accelerate: matmuls with Apple's Accelerate, on macOS; their bits differ from those of every other build
GEMM ?= $(GEMM_KERNELS_$(ISA))
GEMM_KERNELS_x86-64-v2 := portable
GEMM_KERNELS_x86-64-v3 := avx2
GEMM_KERNELS_x86-64-v4 := avx512
# clang for Apple's processors has another flag for the machine's own instruction set.
TUNE := $(shell echo | $(CC) -march=$(ISA) -E -x c - > /dev/null 2>&1 && echo -march=$(ISA) || echo -mcpu=$(ISA))
OPTIMIZE ?= -O3 $(TUNE)$(if $(GEMM), -DGEMM_KERNELS='"$(GEMM)"')
WARNINGS ?= -Wall -Wextra -Wshadow -Werror
## B=build: the folder for what is built; the builds of another ISA or GEMM have a folder of their own
B ?= build$(patsubst %,/%,$(filter-out native,$(ISA)))$(patsubst %,/%,$(filter-out $(GEMM_KERNELS_$(ISA)),$(GEMM)))
ifeq ($(MAKELEVEL),0)
# One more job than there are processors, since tests with several processes sometimes wait.
MAKEFLAGS += -j$(shell expr 1 + "$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)")
endif

# The compiler may not contract to a fused multiply-add by itself: llmtrain/ops/arithmetic.h says why. Giving up errno
# and traps of mathematical functions lets loops vectorize and changes no result; nothing here is -ffast-math.
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
HEADERS := $(wildcard *.h $(addsuffix *.h,llmtrain/*/ llmtrain/*/*/ tools/ launch/ dev/ dev/bench/ dev/test/ data/))
PRECISIONS := FP32 BF16 FP16
$(if $(filter $(PRECISION),$(PRECISIONS)),,$(error PRECISION is '$(PRECISION)'; give one of $(PRECISIONS)))

##@ Programs
## all: ./train and ./supervise, as `make` alone
.PHONY: all train supervise demo demo-long demo-chat test single install uninstall clean help
all: train supervise
MPICC := $(if $(filter off,$(MPI)),,$(shell command -v mpicc 2>/dev/null))
$(if $(filter on,$(MPI)$(MPICC)),$(error MPI=on, but there is no mpicc; apt-get install -y libopenmpi-dev))
MPI_OF = $(shell $(MPICC) --showme:$(1) 2>/dev/null || $(MPICC) -$(1)_info | cut -d' ' -f2-)
MPIFLAGS := $(if $(MPICC),-DLLMTRAIN_MPI $(call MPI_OF,compile) $(call MPI_OF,link))
GPU_FOUND := $(if $(filter off,$(CUDA)),,$(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes))
NVCC_FOUND := $(or $(shell command -v $(NVCC) 2>/dev/null),$(wildcard $(NVCC:nvcc=/usr/local/cuda/bin/nvcc)))
NVCC := $(or $(NVCC_FOUND),$(NVCC))
$(if $(filter yes0,$(GPU_FOUND)$(MAKELEVEL)$(NVCC_FOUND)),$(warning there is a GPU, but no nvcc: a build for the CPU; \
    install the CUDA toolkit, or name its compiler with NVCC=))
$(if $(filter $(CUDA),auto on off),,$(error CUDA is '$(CUDA)'; give auto, on or off))
ifeq ($(CUDA)$(ARCH)$(GPU_FOUND),onnative)  # -arch=native asks the device; without a device nvcc would guess
$(error CUDA=on, but there is no GPU to ask for its architecture; give ARCH, as sm_80 (A100), sm_90a (H100) ...)
endif
FOR_GPU := $(filter on,$(CUDA))$(and $(GPU_FOUND),$(NVCC_FOUND))
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(realpath $(NVCC_FOUND)))
NCCL_FOUND := $(if $(filter off,$(NCCL)),,$(if $(wildcard $(CUDA_HOME)/include/nccl.h /usr/include/nccl.h \
    /usr/local/include/nccl.h),yes))
$(if $(filter on,$(NCCL)$(NCCL_FOUND)),$(error NCCL=on, but there is no nccl.h; apt-get install -y libnccl-dev))
NVCCFLAGS := -std=c++20 -O3 -DLLMTRAIN_CUDA $(NCCL_FOUND:yes=-DLLMTRAIN_NCCL) -I. \
    -Xcompiler -Wall,-Wextra,-Wno-missing-field-initializers,-fopenmp,-ffp-contract=off
NVCCARCH := $(if $(filter native,$(ARCH)),-arch=native,$(foreach a,$(ARCH:sm_%=%),\
    -gencode arch=compute_$(a),code=sm_$(a)))
NVCCLIBS := -lcublasLt $(NCCL_FOUND:yes=-lnccl)
CUDA_HEADERS := $(HEADERS) $(wildcard *.cuh llmtrain/*/*.cuh llmtrain/*/*/*.cuh)

## train: the trainer, as ./train
TRAIN := $(B)/train$(if $(FOR_GPU),-cuda,$(if $(MPICC),-mpi))-$(PRECISION)
train: $(TRAIN)
	@cp -f $< $@
## supervise: ./supervise, which restarts a trainer that dies or hangs
supervise: $(B)/supervise
	@cp -f $< $@
$(B): ; @mkdir -p $@
$(B)/train-%: train.cu $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -x c $< -o $@ $(LIBS)
$(B)/train-mpi-%: train.cu $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -x c $< -x none -o $@ $(MPIFLAGS) $(LIBS)
$(PRECISIONS:%=$(B)/train-cuda-%): $(B)/train-cuda-%: train.cu $(CUDA_HEADERS) | $(B)
	$(NVCC) $(NVCCFLAGS) $(NVCCARCH) -DPRECISION_$* $< -o $@ $(NVCCLIBS)
TOOLS := generate evaluate plan tune
## build/generate: samples text from a model, or talks with it
## build/evaluate: a model's loss on a text, its scores on questions with choices
## build/plan: the flags with which a model fits into a memory, and how long a step takes
$(B)/generate $(B)/evaluate $(B)/plan: $(B)/%: $(B)/%-$(PRECISION)
	@cp -f $< $@
## build/tune: times a GPU's matmuls
$(B)/tune: $(B)/tune$(if $(FOR_GPU),-cuda)-$(PRECISION)
	@cp -f $< $@
OF_TOOL = -DPRECISION_$(lastword $(subst -, ,$(@F))) $(1) tools/$(firstword $(subst -, ,$(@F))).cu -o $@
$(foreach t,$(TOOLS),$(PRECISIONS:%=$(B)/$t-%)): $(HEADERS) $(wildcard tools/*.cu) train.cu | $(B)
	$(CC) $(CFLAGS) $(call OF_TOOL,-x c) $(LIBS)
$(foreach t,$(TOOLS),$(PRECISIONS:%=$(B)/$t-cuda-%)): $(CUDA_HEADERS) $(wildcard tools/*.cu) train.cu | $(B)
	$(NVCC) $(NVCCFLAGS) $(NVCCARCH) $(call OF_TOOL) $(NVCCLIBS)
## build/export: writes a model in the formats of other programs; build/report: a page about runs
$(B)/export: tools/export.cu $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -x c $< -o $@ $(LIBS)

## build/tensorboard: event files for TensorBoard of finished runs
# Libraries that decompress texts for build/tokenize, if installed with headers: zlib for gzip, libzstd for zstd.
HAS = $(shell echo 'int main(void){return 0;}' | $(CC) -include $(1) -x c - -o /dev/null $(2) 2>/dev/null && echo yes)
UNPACK := $(if $(call HAS,zlib.h,-lz),-DLLMTRAIN_ZLIB -lz) $(if $(call HAS,zstd.h,-lzstd),-DLLMTRAIN_ZSTD -lzstd)
## build/tokenize: makes token shards of texts
## build/corpus: writes a text of known entropy
## build/watch: shows how runs are doing
$(B)/tokenize $(B)/test_text: LIBS := $(UNPACK) $(LIBS)
# Every other program build/NAME is NAME.c in one of these folders.
define C_PROGRAMS
$(B)/%: $(1)/%.c $(HEADERS) | $(B)
	$$(CC) $$(CFLAGS) -I. $$< -o $$@ $$(LIBS)
endef
$(foreach folder,launch data tools examples dev/bench dev/test dev/peers,$(eval $(call C_PROGRAMS,$(folder))))

include dev/build.mk

##@ Using them
## demo: a corpus of known entropy, a model trained on it, its text: under 5 minutes on 2 cores
## demo-long: the same for half an hour, to within 3% of the entropy floor
## demo-chat: a model that answers questions in a chat, by LoRA and by full fine-tuning: 20 minutes on 2 cores
demo-chat: $(B)/export
demo demo-long demo-chat: $(addprefix $(B)/,train-FP32 generate-FP32 corpus tokenize)
	@sh dev/demos/$(if $(filter %chat,$@),demo_chat,demo).sh $(B) $(filter long,$(@:demo-%=%))
## test: the tests, without a GPU and without a network
# With a C++ compiler, all of CUDA too. The parts run in parallel; tests that measure times run afterwards, one by one.
test: $(if $(CXX_FOUND),test-cpu test-cuda,test-cpu-only)
	@sh dev/test/test.sh alone $(B) "$(CC)" overlap cliffs
	@cat $(TEST_PARTS:%=$(B)/test-%.sum) 2>/dev/null | awk \
	    '{ p += $$1; f += $$3 } END { print p " passed, " f " failed in all"; exit f > 0 }'
## single: the runtime as one header, build/llmtrain_single.h
single: $(B)/llmtrain_single.h
$(B)/llmtrain_single.h: dev/single.sh $(CUDA_HEADERS) | $(B)
	@sh dev/single.sh > $@.new && mv $@.new $@ && echo "$@: $$(wc -l < $@) lines"
## install: programs as llmtrain-NAME, the single header as llmtrain.h, and llmtrain.pc; PREFIX=/usr/local DESTDIR=
## uninstall: removes what install has written
PREFIX ?= /usr/local
INSTALLED := $(TRAIN) $(addprefix $(B)/,supervise generate evaluate plan export watch report tokenize corpus \
    llmtrain_single.h)
install: $(INSTALLED)
install uninstall:
	@DESTDIR="$(DESTDIR)" OPENMP="$(OPENMP)" sh dev/install.sh $@ "$(abspath $(PREFIX))" $(INSTALLED)
## clean: removes what was built
clean: ; rm -rf $(B) train supervise
## help: this list
help:
	@awk '/^##@ / { print (n++ ? "\n" : "") substr($$0, 5) } /^## / { i = index($$0, ": "); \
	    printf "  %-18s %s\n", substr($$0, 4, i - 4), substr($$0, i + 2) }' $(MAKEFILE_LIST)
