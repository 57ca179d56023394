# One word for each thing that a person wants. The work is in `lab` (see lab/), which builds what it needs.

RUN = cargo run -q -p mercury-lab-bench --
# The machines' make: amd (QEMU), bochs-amd, intel, intel-haswell, intel-sandybridge, intel-tigerlake.
export LAB ?= amd
# Time limits of tests are stretched by this much: hosts are shared, and the emulator is slow.
export MERCURY_LAB_PATIENCE ?= 3
# Long tests run as well, if this is not empty.
export MERCURY_LAB_FULL = $(FULL)
# Tests that find no machine within so many minutes are left out, by name, if this is not empty.
export MERCURY_LAB_MINUTES = $(MINUTES)
export PATH := $(HOME)/.cargo/bin:$(PATH)

.PHONY: help demo demo-move demo-checkpoint demo-guard demo-guest demo-disco hosted test shell pair bench soak campaign \
	deb check miri tsan clean bootstrap

help:
	@echo 'make demo      attach and detach beneath a machine that is hard at work'
	@echo 'make demo-checkpoint   a machine with PostgreSQL into an image, power off, and brought back elsewhere'
	@echo 'make demo-guard   a driver corrupts memory: the machine goes back in an instant, and names the driver'
	@echo 'make demo-guest   a bare machine into an image, power off, and on as a guest of another one with KVM'
	@echo 'make demo-disco   32 Linux machines begin as copies of one, and share memory'
	@echo 'make demo-move a machine with PostgreSQL moves to another one and back, with clients outside'
	@echo 'make shell     a machine to play with; make shell KERNEL=trixie-cloud CPUS=4 ROOT=disk DISK=4G'
	@echo 'make pair      two machines on one network: move the shell that you type into from one to the other'
	@echo 'make hosted    a Debian in a process, with a shell; make hosted ARGS=--isolation=process'
	@echo 'make test      the tests that are not long; make test FILTER=machine LAB=intel'
	@echo 'make test FULL=1   the long ones as well, those in Bochs, and make check: some hours'
	@echo 'make test MINUTES=40   no test begins later than that; those left out are named'
	@echo 'make check     formatting, lints, style of the driver, a minute of each fuzz target'
	@echo 'make bench     the tables of this project; `lab bench papers` has those of both papers'
	@echo 'make soak      for hours; make soak LAB=intel CYCLES=1000'
	@echo 'make campaign  faults into a machine that has to go back each time; LOAD=postgres CPUS=4 COUNT=50'
	@echo 'make deb       the Debian packages'
	@echo 'make miri, make tsan   unit tests of shared memory under checkers that need the nightly toolchain'
	@echo 'make clean     removes all that was built, the images too'

bootstrap:
	@scripts/bootstrap

demo bench deb check: bootstrap
	@$(RUN) $@

demo-move: bootstrap
	@$(RUN) demo move

demo-checkpoint: bootstrap
	@$(RUN) demo checkpoint

demo-guard: bootstrap
	@$(RUN) demo guard

demo-guest: bootstrap
	@$(RUN) demo guest

demo-disco: bootstrap
	@$(RUN) demo disco

pair: bootstrap
	@$(RUN) pair $(if $(KERNEL),--kernel $(KERNEL)) $(if $(CPUS),--cpus $(CPUS)) \
		$(if $(MEMORY),--memory $(MEMORY))

hosted: bootstrap
	@$(RUN) hosted $(ARGS)

soak: bootstrap
	@$(RUN) soak $(if $(CYCLES),--cycles $(CYCLES))

campaign: bootstrap
	@$(RUN) campaign $(if $(KERNEL),--kernel $(KERNEL)) $(if $(CPUS),--cpus $(CPUS)) \
		$(if $(LOAD),--load $(LOAD)) $(if $(MOMENT),--moment $(MOMENT)) $(if $(COUNT),--count $(COUNT)) \
		$(if $(SEED),--seed $(SEED))

test: bootstrap
	@$(RUN) test $(FILTER)

shell: bootstrap
	@$(RUN) shell $(if $(KERNEL),--kernel $(KERNEL)) $(if $(CPUS),--cpus $(CPUS)) \
		$(if $(MEMORY),--memory $(MEMORY)) \
		$(if $(ROOT),--root $(ROOT)) $(if $(DISK),--disk $(DISK))

miri:
	@scripts/sanitize miri

tsan:
	@scripts/sanitize thread

clean:
	@scripts/clean
