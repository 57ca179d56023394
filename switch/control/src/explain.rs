//! The explanation of every code: its meaning, the reason why Mercury stops there, and the remedy.

use mercury_abi::code::Code;

#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub code: Code,
    /// The meaning: a sentence without a full stop.
    pub meaning: &'static str,
    /// The reason why Mercury refuses.
    pub why: &'static str,
    pub remedy: &'static str,
}

const fn entry_of(code: Code, meaning: &'static str, why: &'static str, remedy: &'static str) -> Entry {
    Entry { code, meaning, why, remedy }
}

const REPORT: &str =
    "this is a bug: please report it with the output of `mercury status --json` and `mercury log`";
const RELOAD: &str = "look at `mercury status` and `mercury log`, then `mercury unload` and `mercury load`";

/// All entries, in numerical order.
pub const TABLE: &[Entry] = &[
    entry_of(Code::Ok, "it worked", "Nothing was refused.", "nothing"),
    entry_of(
        Code::AbiMismatch,
        "command, driver and hypervisor are of different versions",
        "Each structure that crosses into the kernel carries its size and version. A request of another \
         version is refused, because the kernel would misread it.",
        "install the command and the driver from the same release, then `mercury unload` and `mercury load`",
    ),
    entry_of(
        Code::BadArgument,
        "an argument of the request has no meaning",
        "Unknown flags, reserved fields that are not zero and numbers out of range are refused, so that a \
         later version can give them a meaning.",
        "check the arguments; if you used only the mercury command, report it as a bug",
    ),
    entry_of(
        Code::NotLoaded,
        "the hypervisor is not loaded",
        "The operation needs the hypervisor in memory.",
        "run `mercury load` (`mercury attach` does it by itself)",
    ),
    entry_of(
        Code::AlreadyLoaded,
        "the hypervisor is loaded already",
        "It is loaded once and then stays in memory until `mercury unload`.",
        "nothing: go on with `mercury attach`",
    ),
    entry_of(
        Code::StillAttached,
        "CPUs are attached that must be native for this",
        "The hypervisor's memory cannot be freed while a CPU runs on it.",
        "run `mercury detach` first, or `mercury unload --detach`",
    ),
    entry_of(
        Code::Busy,
        "another process controls Mercury",
        "Only one process at a time may change modes, so that two processes never switch the same CPU.",
        "wait until that process is done, or end it; `mercury status` shows it",
    ),
    entry_of(
        Code::CpuOffline,
        "the CPU does not exist or is offline",
        "Only a running CPU can switch.",
        "see which CPUs are online in /sys/devices/system/cpu/online, or leave out --cpus",
    ),
    entry_of(
        Code::GoingDown,
        "the machine is going down or has panicked",
        "Mercury leaves every CPU native while the kernel takes the machine down.",
        "attach again after the restart",
    ),
    entry_of(
        Code::BadImage,
        "the hypervisor in the driver is damaged or from another build",
        "The image carries its version and layout. The driver executes no image that does not match.",
        "build and install the driver again: `dkms remove mercury --all`, then reinstall the package",
    ),
    entry_of(
        Code::UnknownOperation,
        "the hypervisor does not know the operation",
        "Driver and hypervisor are built together. They come from different builds here.",
        "install the driver again; if the refusal stays, report it as a bug",
    ),
    entry_of(
        Code::Crashed,
        "the hypervisor crashed and was taken out",
        "Every CPU went back to native and the system runs on. The driver no longer trusts the \
         hypervisor's memory.",
        RELOAD,
    ),
    entry_of(
        Code::OrphanedHypervisor,
        "CPUs run above a hypervisor whose driver is gone",
        "The driver was removed while a CPU did not leave the hypervisor. The system runs on above the \
         hypervisor, but no driver can reach it any more: the way out of it was in the memory of the \
         removed driver.",
        "reboot; until then KVM and other hypervisors find the hardware taken",
    ),
    entry_of(
        Code::LockedDown,
        "the kernel is locked down",
        "With integrity lockdown, which Secure Boot switches on, no program may replace the kernel's \
         memory: no machine is restored or received here. With confidentiality lockdown no program may \
         read it either: there is no checkpoint, and the machine cannot move. Attaching, and snapshots \
         that stay in memory, are allowed.",
        "boot without `lockdown=` (and without Secure Boot, if that asks for it), or use another machine; \
         `cat /sys/kernel/security/lockdown` shows the mode",
    ),
    entry_of(
        Code::NoContiguousMemory,
        "there is too little physically contiguous memory",
        "The hypervisor's image and each CPU's area each lie in one piece of physical memory.",
        "`echo 3 > /proc/sys/vm/drop_caches; echo 1 > /proc/sys/vm/compact_memory`, then try again; at \
         boot there is always enough: `systemctl enable mercury`",
    ),
    entry_of(
        Code::NoMemory,
        "there is too little memory",
        "The hypervisor needs at most 4 MiB, and 64 KiB for each possible CPU. A move of a guest of \
         Mercury's needs a copy of its monitor on the host, which had no room for another process.",
        "free some memory and try again; for a guest, on its host",
    ),
    entry_of(
        Code::NeedPages,
        "the nested tables need more pages",
        "The driver donates pages and asks again. If you see this code, it is a bug.",
        REPORT,
    ),
    entry_of(
        Code::More,
        "building the tables is not finished",
        "The driver calls again until it is finished. If you see this code, it is a bug.",
        REPORT,
    ),
    entry_of(
        Code::VendorUnsupported,
        "the processor is neither from AMD nor from Intel",
        "Mercury uses AMD's SVM or Intel's VMX.",
        "use a machine with an AMD processor of family 17h (Zen) or later, or one by Intel with EPT",
    ),
    entry_of(
        Code::FamilyUnsupported,
        "the AMD processor is older than family 17h",
        "Older families have errata in nested paging that Mercury does not work around.",
        "use a machine with an AMD processor of family 17h (Zen) or later",
    ),
    entry_of(
        Code::NoSvm,
        "the processor reports no SVM",
        "A hypervisor cannot be slipped beneath a system without hardware virtualization.",
        "in a virtual machine, ask for nested virtualization (QEMU: -cpu host or EPYC,+svm)",
    ),
    entry_of(
        Code::SvmDisabled,
        "SVM is disabled by firmware",
        "The processor has SVM, but the firmware switched it off (VM_CR.SVMDIS).",
        "enable \"SVM Mode\" (or \"Virtualization\") in the firmware's setup and reboot",
    ),
    entry_of(
        Code::NoNestedPaging,
        "the processor has no nested paging",
        "Without nested paging every page-table change of the kernel would have to be intercepted.",
        "in a virtual machine, switch it on (QEMU: +npt); no AMD processor since 2007 lacks it",
    ),
    entry_of(
        Code::NoAsids,
        "there are fewer than two address-space identifiers",
        "The running system needs one identifier besides the hypervisor's own (0).",
        "the emulation, or another hypervisor beneath, is at fault: report it there",
    ),
    entry_of(
        Code::InitRedirected,
        "INIT is redirected (VM_CR.R_INIT)",
        "VM_CR.R_INIT turns INIT into an exception. A hypervisor that is already beneath this system does \
         that.",
        "remove the other hypervisor, or reboot",
    ),
    entry_of(
        Code::VirtualizationInUse,
        "hardware virtualization is in use already",
        "A CPU has one hypervisor at a time. KVM of Linux 6.12 takes the hardware as soon as it is \
         loaded, even without a virtual machine. On AMD, KVM can go on above Mercury, but only if no \
         other hypervisor's module (VirtualBox's vboxdrv, VMware's vmmon) could be the one that holds the \
         hardware.",
        "unload the other hypervisor; if it is KVM, and no virtual machine runs: `mercury attach \
         --unload-kvm`, or `modprobe -r kvm_amd kvm` (kvm_intel on Intel); for good: put `options kvm \
         enable_virt_at_load=0` into /etc/modprobe.d/mercury.conf and reboot",
    ),
    entry_of(
        Code::IntelUnsupported,
        "a refusal that no current version gives",
        "This number once stood for processors by Intel. They are supported now, and refused by name if \
         they lack something that Mercury needs (no-vmx, no-ept and others).",
        "install the command and the driver from the same release; `mercury doctor` says what this \
         processor lacks",
    ),
    entry_of(
        Code::Cr0Unsupported,
        "CR0 holds a bit or a combination that Mercury does not carry over",
        "Mercury carries the processor's whole state across the switch. The state of an unknown bit might \
         be lost.",
        "disabled caches or emulated floating point are not normal on a running system: reboot; if the \
         refusal stays, report it",
    ),
    entry_of(
        Code::Cr4Unsupported,
        "CR4 holds a bit that Mercury does not carry over",
        "Each CR4 bit is a feature with state of its own. The state of an unknown bit might be lost.",
        "switch the named feature off on the kernel's command line, or report it with the processor's model",
    ),
    entry_of(
        Code::EferUnsupported,
        "EFER holds a bit that Mercury does not carry over",
        "Each EFER bit changes how the processor works. The state of an unknown bit might be lost.",
        "switch the named feature off on the kernel's command line, or report it with the processor's model",
    ),
    entry_of(
        Code::Cr3Unsupported,
        "CR3 holds a bit that Mercury does not carry over",
        "Bits above the physical address width belong to features such as address masking or encryption.",
        "switch the feature off on the kernel's command line, or report it with the processor's model",
    ),
    entry_of(
        Code::XstateUnsupported,
        "an extended state component is enabled that Mercury does not know",
        "Extended state stays in the processor across a switch. This was checked for each known component.",
        "boot with `clearcpuid=` for the feature, or report it with the processor's model",
    ),
    entry_of(
        Code::SupervisorCet,
        "the kernel itself uses shadow stacks, or branch tracking where it cannot be carried",
        "The state of shadow stacks and branch tracking changes with each instruction of the switch.",
        "boot without kernel shadow stacks; for branch tracking, boot with `ibt=off`",
    ),
    entry_of(
        Code::MemoryEncryption,
        "memory encryption (SME) is active",
        "With SME every address of the kernel carries the encryption bit. The hypervisor's addresses do not.",
        "boot with `mem_encrypt=off`; transparent encryption (TSME) in the firmware does no harm",
    ),
    entry_of(
        Code::SnpEnabled,
        "this host is set up for SEV-SNP guests",
        "The processor checks every page that a hypervisor uses against SEV-SNP's reverse map.",
        "disable SEV-SNP in the firmware's setup, or boot with `kvm_amd.sev_snp=0` and reboot",
    ),
    entry_of(
        Code::PatUnsupported,
        "entry 0 of the PAT is not write-back",
        "Nested tables use entry 0 for all memory, so all memory would become slow or incoherent.",
        "Linux always programs write-back there: find out what changed it, and reboot",
    ),
    entry_of(
        Code::TscRatio,
        "the TSC ratio is not 1.0",
        "The clock would jump at attach. An earlier hypervisor left this ratio behind.",
        "load and unload kvm_amd once (it resets the ratio), or reboot",
    ),
    entry_of(
        Code::InvlpgbInUse,
        "the kernel broadcasts TLB invalidations with INVLPGB",
        "A broadcast from a native CPU does not reach the translations of an attached CPU.",
        "boot with `clearcpuid=invlpgb`",
    ),
    entry_of(
        Code::MachineCheckInProgress,
        "a machine check is in progress",
        "The processor has just reported a hardware error.",
        "look at `dmesg` for the error, and repair the hardware",
    ),
    entry_of(
        Code::PageTableIsolation,
        "the kernel isolates its page tables (PTI)",
        "AMD processors do not need PTI; the kernel's command line asks for it with pti=on.",
        "boot without `pti=on`",
    ),
    entry_of(
        Code::SingleStep,
        "a debugger single-steps the switch",
        "A debug exception inside the switch would arrive with half of the state changed.",
        "stop the kernel debugger",
    ),
    entry_of(
        Code::MemoryBeyondMap,
        "physical memory reaches beyond the nested map",
        "The nested map covers the physical address width, and 48 bits with four-level paging.",
        "boot with five-level paging (no `no5lvl`), or keep the firmware from placing devices that high \
         (\"Above 4G decoding\")",
    ),
    entry_of(
        Code::CpusDiffer,
        "a CPU differs from the first one in a feature that the hypervisor relies on",
        "One set of tables and one set of features serve all CPUs.",
        "update the firmware or the microcode so that all CPUs are equal, and reboot; or attach only the \
         equal ones with --cpus",
    ),
    entry_of(
        Code::KernelUntested,
        "this kernel is of a series that Mercury was never tested on",
        "The tests run on Debian's 6.1 and 6.12.",
        "run Debian 12's 6.1 or Debian 13's 6.12; to try it on this kernel: `mercury attach --force`",
    ),
    entry_of(
        Code::Lockdown,
        "kernel lockdown or module signing keeps the driver out",
        "With Secure Boot the kernel loads only modules signed with a key that it knows.",
        "enrol DKMS's key: `mokutil --import /var/lib/dkms/mok.pub`, reboot, confirm in the firmware's \
         dialogue, then `dkms install --force mercury/$(mercury --version | cut -d' ' -f2)`",
    ),
    entry_of(
        Code::Fred,
        "FRED event delivery is on",
        "FRED changes how every interrupt and exception arrives, and Mercury does not know it.",
        "boot without `fred=on`",
    ),
    entry_of(
        Code::PrivilegedLayer,
        "Xen or another privileged layer is beneath this kernel",
        "That layer owns the machine, and Mercury would take the machine away from it.",
        "boot Linux without that layer",
    ),
    entry_of(
        Code::InsideHypervisor,
        "this machine is itself a virtual machine",
        "Mercury works here, but the hypervisor beneath emulates each world switch, which takes 20 to 50 µs.",
        "nothing; measure on bare metal",
    ),
    entry_of(
        Code::SegmentUnreadable,
        "the descriptor of a segment register cannot be read back",
        "The switch puts each segment back from its descriptor.",
        "look for a process with a damaged LDT; then try again",
    ),
    entry_of(
        Code::FactUnreadable,
        "a register that must be checked cannot be read",
        "Mercury does not count an impossible check as passed.",
        "in a virtual machine, the hypervisor beneath does not emulate the register: use another CPU \
         model or version",
    ),
    entry_of(
        Code::StateChanged,
        "the state of the CPU changed between the checks and the switch",
        "The kernel has switched machine checks on since the hypervisor was loaded.",
        "`mercury unload`, then attach again",
    ),
    entry_of(
        Code::MtrrInconsistent,
        "the MTRRs are disabled or differ between CPUs",
        "The kernel expects equal MTRRs. Memory may be slow on some CPUs, with or without Mercury.",
        "update the firmware; attach is not affected",
    ),
    entry_of(
        Code::DebugActive,
        "branch recording or hardware breakpoints are active",
        "Both go on working. Recorded branches may include the hypervisor's.",
        "nothing",
    ),
    entry_of(
        Code::HsaveInUse,
        "VM_HSAVE_PA is not zero: another hypervisor used SVM before",
        "Detach puts the value back.",
        "nothing; unload the other hypervisor's module if it is not needed",
    ),
    entry_of(
        Code::SelfTestFailed,
        "the self-test on the first CPU failed",
        "The first CPU attaches alone and compares its state with the state before. Some state differed.",
        REPORT,
    ),
    entry_of(
        Code::ErapsInUse,
        "the kernel relies on the processor to protect return predictions (ERAPS)",
        "The processor protects return predictions of a native kernel by itself, and those of an attached \
         one only in part.",
        "boot with `clearcpuid=664`",
    ),
    entry_of(
        Code::NoVmx,
        "the processor reports no VMX",
        "A hypervisor cannot be slipped beneath a system without hardware virtualization.",
        "in a virtual machine, ask for nested virtualization (QEMU: -cpu host,+vmx)",
    ),
    entry_of(
        Code::VmxDisabled,
        "VMX is disabled by firmware",
        "The processor has VMX, but IA32_FEATURE_CONTROL does not allow it outside of SMX, or is not locked.",
        "enable \"VT-x\" (or \"Virtualization\") in the firmware's setup and switch the machine off and on",
    ),
    entry_of(
        Code::NoEpt,
        "the processor has no extended page tables",
        "Without extended page tables every page-table change of the kernel would have to be intercepted.",
        "use a machine with an Intel processor of 2010 (Westmere) or later; in a virtual machine, \
         switch EPT on",
    ),
    entry_of(
        Code::NoUnrestrictedGuest,
        "the processor has no unrestricted guest",
        "A CPU that is reset starts in real mode, and must be able to do so above the hypervisor.",
        "use a machine with an Intel processor of 2010 (Westmere) or later",
    ),
    entry_of(
        Code::EptUnsupported,
        "the extended page tables lack something that Mercury needs",
        "The nested map needs write-back tables of four levels, 2 MiB pages, and INVEPT for all contexts.",
        "no processor with EPT is known to lack these features: look at the emulation or the hypervisor \
         beneath",
    ),
    entry_of(
        Code::VmxControlForced,
        "VMX demands a control that Mercury does not know",
        "A control that must be set changes what the system sees, and the effect of this one is not known.",
        "report it with the processor's model",
    ),
    entry_of(
        Code::VmxControlMissing,
        "VMX lacks a control that Mercury needs",
        "Without the control, state of the running system would be lost at each exit.",
        "in a virtual machine, ask for more of VMX (QEMU: -cpu host); otherwise report it with the model",
    ),
    entry_of(
        Code::VmxInstructionLost,
        "an instruction that the kernel may use would be undefined under VMX",
        "CPUID announces the instruction, but the control that permits it to a guest is missing or not \
         known.",
        "boot with `clearcpuid=` for the feature, or report it with the processor's model",
    ),
    entry_of(
        Code::VmxFixedBits,
        "VMX does not allow CR0 or CR4 as they are",
        "VMX operation fixes some bits of these registers.",
        "switch the named feature off on the kernel's command line, or report it with the processor's model",
    ),
    entry_of(
        Code::ProcessorTrace,
        "processor trace is running",
        "This processor cannot run a trace in VMX operation, so attaching would stop the trace.",
        "end the trace (`perf record -e intel_pt//`), then attach",
    ),
    entry_of(
        Code::VmxRegion,
        "VMX requires an unusual kind of memory for its control structures",
        "The control structures must not lie in write-back memory, or only below 4 GiB.",
        "no processor with EPT is known to require that: look at the emulation or the hypervisor beneath",
    ),
    entry_of(
        Code::DebugStore,
        "the processor stores records of samples or branches (PEBS, BTS)",
        "The processor writes the records to virtual addresses. While the hypervisor runs, its page \
         tables are used, which do not map these addresses. A CPU that is attached detaches when \
         recording begins.",
        "end the recording, or let perf sample without such records (`perf record -e cycles` and not \
         `cycles:P`), then attach",
    ),
    entry_of(
        Code::InvalidGuestState,
        "the processor refused the control block",
        "The processor checks the state that it is to run with, and found some of it illegal. The CPU was \
         rolled back.",
        REPORT,
    ),
    entry_of(
        Code::InjectedFault,
        "a test injected a fault here",
        "Only builds for tests have fault points.",
        "disarm it: `mercury fault 0`",
    ),
    entry_of(
        Code::FaultInSwitch,
        "the hypervisor faulted while it switched",
        "The CPU was rolled back to native; the system was not touched.",
        REPORT,
    ),
    entry_of(
        Code::WrongMode,
        "a CPU is not in the expected mode after the switch",
        "The driver asks the CPU for its mode after each switch. Everything was rolled back.",
        REPORT,
    ),
    entry_of(
        Code::HostException,
        "the hypervisor's own code raised an exception",
        "The CPU was detached with the system's state intact. `mercury status` has the record.",
        REPORT,
    ),
    entry_of(
        Code::HostPanic,
        "the hypervisor's own code panicked",
        "The CPU was detached with the system's state intact. `mercury status` has the record.",
        REPORT,
    ),
    entry_of(
        Code::UnknownExit,
        "the CPU left for a reason that the hypervisor does not know",
        "The hypervisor does not guess: it detached the CPU, and the processor executes the instruction \
         natively.",
        REPORT,
    ),
    entry_of(
        Code::SvmReleased,
        "the kernel switched SVM off on this CPU",
        "The hypervisor takes clearing EFER.SVME or VM_HSAVE_PA as a wish to detach. The kernel clears \
         them on a crash, on a forced reboot, or when it unloads KVM.",
        "unload KVM, or attach again when the other user is gone",
    ),
    entry_of(
        Code::MicrocodeUpdate,
        "the kernel loaded microcode",
        "A microcode update must run on the bare processor, so the CPU detached itself before the update.",
        "run `mercury doctor` (the update may have changed features), then attach again",
    ),
    entry_of(
        Code::CpuReset,
        "the CPU was reset while it was attached",
        "A reset ends the hypervisor's hold on the CPU.",
        "attach again; if you did not reset the CPU, look for errors of the firmware in `dmesg`",
    ),
    entry_of(
        Code::NestedMapExhausted,
        "the nested tables could not be extended",
        "A device was used at an address outside of all addresses that the kernel knew at load, and the \
         donated pages ran out. The CPU was detached.",
        "unload and load the hypervisor while that device is present",
    ),
    entry_of(
        Code::VmxReleased,
        "the kernel switched VMX off on this CPU",
        "The hypervisor takes VMXOFF, or clearing CR4.VMXE, as a wish to detach. The kernel does it on a \
         crash, on a forced reboot, or when it unloads KVM.",
        "unload KVM, or attach again when the other user is gone",
    ),
    entry_of(
        Code::MtrrChanged,
        "the kernel changed an MTRR",
        "Under VMX the nested tables give memory its type. They repeat the MTRRs of the load.",
        "unload and load the hypervisor, then attach again",
    ),
    entry_of(
        Code::GuestUnsupported,
        "a virtual machine of KVM's cannot run beneath Mercury",
        "Its memory or registers are encrypted (SEV), interrupts reach it without an exit (AVIC), or the \
         processor has no address-space identifier left. The CPU that was to run it detached itself, and \
         runs it natively.",
        "stop that virtual machine, or set `kvm_amd.avic=0`, and attach again",
    ),
    entry_of(
        Code::SnapshotLive,
        "there is a snapshot of memory",
        "The operation cannot run while there is a snapshot. In a guest of Mercury's, the host may not have \
         ended the copy of an earlier move yet.",
        "wait for the command that needs the snapshot, or end it; `mercury snapshot --drop` gives up a \
         snapshot that is kept",
    ),
    entry_of(
        Code::NoSnapshot,
        "there is no snapshot of memory",
        "The snapshot has ended, or never began.",
        "begin one first: `mercury snapshot`",
    ),
    entry_of(
        Code::SnapshotMissed,
        "not every CPU came to the rendezvous of the snapshot",
        "All CPUs meet in the hypervisor for a moment. One did not come within a second or two. The \
         machine runs on without a snapshot.",
        "try again; look for a CPU that is held up (`mercury status`, a virtual machine beneath this one)",
    ),
    entry_of(
        Code::SnapshotPool,
        "the pool had no page left for a copy that the snapshot needed",
        "The machine wrote to more pages than there was room for copies, so the snapshot was given up. \
         The machine itself lost nothing.",
        "free memory, reduce the load of the machine, or stream to a faster target",
    ),
    entry_of(
        Code::SnapshotLost,
        "a CPU left the hypervisor beneath a snapshot, or the copy of a guest's memory has ended",
        "The hypervisor could not see what that CPU wrote after it left, so the snapshot was given up. In a \
         guest of Mercury's the snapshot is a copy on the host. The host's kernel ends that copy before the \
         guest if memory is short. The machine itself lost nothing.",
        "look at `mercury log` for why it left, and try again; for a guest, first make room for memory on \
         its host",
    ),
    entry_of(
        Code::SnapshotDevices,
        "the driver cannot see which memory devices write to",
        "Devices write to memory without asking the nested tables, so the driver watches by ftrace which \
         memory the kernel gives them. The driver could not watch, or the first virtual device came while \
         it watched. Or a process began to drive a device by itself (VFIO, uio), or to share its page \
         tables with one: such a device writes unseen.",
        "end the program that drives the device, and try again; if there is none, \
         boot a kernel with CONFIG_DYNAMIC_FTRACE_WITH_REGS and CONFIG_KPROBES, and \
         set the sysctl kernel.ftrace_enabled to 1",
    ),
    entry_of(
        Code::SnapshotQuiesce,
        "the kernel could not stop its tasks and devices for the instant",
        "A task did not freeze within 1.5 s, or a driver refused to suspend its device. \
         The machine runs on.",
        "`dmesg` names the task or the driver",
    ),
    entry_of(
        Code::SnapshotHotplug,
        "a CPU or memory came or went, or memory broke, during a snapshot",
        "A CPU that comes online starts without the hypervisor, which then cannot see what the CPU \
         writes. Memory that the kernel has found broken cannot be read. The snapshot was given up. The \
         machine itself lost nothing.",
        "try again: broken memory is then left out; `mercury snapshot` keeps a new snapshot",
    ),
    entry_of(
        Code::FenceUnsupported,
        "this kernel has no hooks for packets, so the network cannot be fenced off",
        "After the instant the machine must not answer its peers, because it goes on from the instant \
         later. The driver stops packets by netfilter's hooks.",
        "boot a kernel with CONFIG_NETFILTER, or take the network down by hand and say --no-fence",
    ),
    entry_of(
        Code::SnapshotGuest,
        "a virtual machine ran whose writes the snapshot, or the dirty log, cannot see",
        "KVM runs it without nested paging, its memory is encrypted (SEV), or interrupts reach it without \
         an exit (AVIC). Its writes bypass the tables of the snapshot or the dirty log, which was given \
         up. The machine itself lost nothing.",
        "shut such virtual machines down first, or load kvm_amd with npt=1 and avic=0",
    ),
    entry_of(
        Code::SnapshotSwap,
        "memory was swapped out to a disk at the instant",
        "Pages on a swap disk are in no image and in no snapshot. `mercury` switches swap off before the \
         instant, and on again after it. An area was switched on meanwhile. No snapshot was kept, and the \
         machine runs on.",
        "find the program that runs `swapon` on this machine (`swapon --show`), and try again",
    ),
    entry_of(
        Code::RollbackUnsupported,
        "this processor cannot put a machine back to a snapshot",
        "A rollback fetches all CPUs by NMI. On Intel's processors this needs virtual NMIs, exits at the \
         NMI window and the monitor trap flag. A hypervisor beneath this machine may lack one of them.",
        "use `mercury checkpoint`, which works on this processor",
    ),
    entry_of(
        Code::RollbackMissed,
        "a CPU could not be fetched for the rollback",
        "All CPUs meet in the hypervisor before anything is put back. One did not come within a second or \
         two, even by NMI: it may be in a handler of NMIs that does not end. Nothing was put back, and \
         the snapshot is lost.",
        "reboot if the machine is not usable",
    ),
    entry_of(
        Code::RollbackDevices,
        "there are devices that the hypervisor could not keep from writing to memory",
        "Before memory is put back all devices are silenced. This is done by PCI's configuration ports, \
         which reach the first segment only. `dmesg` names a device in another segment.",
        "disable the device in the firmware, such as VMD",
    ),
    entry_of(
        Code::MacsecInUse,
        "a network device encrypts with MACsec, whose packet numbers must not be used twice",
        "A machine that is brought back, or put back, counts its packets on from the instant. Packets \
         that it sent after the instant had the same numbers and the same key, so an attacker who has \
         recorded both can read them. The kernel does not let the driver end MACsec's associations.",
        "delete the device (ip link delete …) before a snapshot, a checkpoint or a move, \
         and make it again afterwards, with new keys",
    ),
    entry_of(
        Code::RollbackRepeated,
        "the machine died of the same three times in ten minutes",
        "A machine that went back each time would do so for ever. So the snapshot was given up, and the \
         panic or the shutdown went on: to a crash kernel, or to a reboot (kernel.panic). Panics are the \
         same if their stacks are, triple faults if they are at the same address. Rollbacks on command do \
         not count.",
        "look into the core of the crash kernel, or the log of the console; before the third time \
         `mercury postmortem` shows what ended",
    ),
    entry_of(
        Code::NoPostMortem,
        "there is no life that a post-mortem could be of",
        "The memory of the life that ended is kept after a rollback. It goes with `mercury postmortem \
         --drop`, with the snapshot, and with the next rollback, which keeps a later life. It also gives \
         way when the pool has no page left for the snapshot, or when the system has no memory left. Or \
         there was no rollback yet.",
        "run `mercury postmortem --core` soon after a rollback, or use a larger pool (`mercury snapshot \
         --pool`)",
    ),
    entry_of(
        Code::LogUnsupported,
        "there is no dirty log on this processor, beneath this kernel, or with these devices",
        "A dirty log tells which pages have changed between two rounds of a migration. So far there is \
         one on AMD's processors only. There is none beneath a kernel that checks its free pages for the \
         pattern that it wrote into them (page_poison=1), or with a virtio device that has packed queues. \
         Hashes of all memory find the changed pages as well, but applications stand still for longer.",
        "nothing needs to be done",
    ),
    entry_of(
        Code::DiskUnsupported,
        "this disk cannot have a dirty log",
        "The block layer's requests tell what is written to a disk while it is copied. Partitions, zoned \
         disks and disks that are made of others (device mapper, RAID, NVMe with several paths) have no \
         requests of their own. A kernel without tracepoints does not report the requests.",
        "name the whole disk that is beneath; or move the machine with files on storage that both \
         machines reach",
    ),
    entry_of(
        Code::DiskLogged,
        "this disk has a dirty log already, or too many disks have one",
        "A disk is copied once at a time, and at most 16 disks are copied.",
        "name each disk once",
    ),
    entry_of(
        Code::NoDiskLog,
        "this disk has no dirty log",
        "The driver has not recorded the writes to this disk, so it cannot tell which parts have changed.",
        REPORT,
    ),
    entry_of(
        Code::RestoreCpus,
        "the CPUs of the image are not those of this machine",
        "Every CPU that was online must be there again, with the same APIC ID, and there must be no \
         other. There may be 506 at the most.",
        "restore the image where it was made, or on a machine equal to that one; all its CPUs must be \
         online, so boot without nosmt and maxcpus",
    ),
    entry_of(
        Code::RestoreMode,
        "the paging depth or the local APIC mode differs from the image's",
        "The kernel of the image was booted with other options, or on a machine with other firmware \
         settings.",
        "boot the restore environment that `mercury restore` prepares: it takes over the options",
    ),
    entry_of(
        Code::RestoreOverlap,
        "this kernel occupies memory that the image needs",
        "Frames go to their own addresses, so only a small kernel, booted with mem=, can bring a machine \
         back.",
        "let `mercury restore` start its own restore environment",
    ),
    entry_of(
        Code::RestoreRoom,
        "too little memory is free beside the image",
        "Frames whose addresses the restore environment occupies have to wait elsewhere: in memory that \
         the image leaves out, or in pages that are zero in the image.",
        "give the environment less memory (--memory), or make the image with a larger pool",
    ),
    entry_of(
        Code::RestoreIncomplete,
        "frames of the image are missing",
        "The image ended before every page of memory had been loaded.",
        "`mercury inspect --verify` says what is wrong with the image",
    ),
    entry_of(
        Code::RestoreFrame,
        "a frame is not part of the image, or is there twice",
        "The image contradicts itself.",
        "`mercury inspect --verify` says what is wrong with the image",
    ),
    entry_of(
        Code::RestoreQuiesce,
        "the kernel could not stop its devices",
        "A driver of the restore environment refused to suspend its device. Nothing was changed; the \
         image is as before.",
        "`dmesg` names the driver; start over",
    ),
    entry_of(
        Code::RestoreMemory,
        "the restore environment does not find memory of the image's machine",
        "Neither the firmware's memory map nor an ACPI memory device has this memory. Two reasons are \
         possible. A DIMM may not be in the slot in which the image's machine had it. Or a driver makes \
         the memory available after each boot (virtio-mem, Hyper-V, CXL regions), and the environment has \
         no such driver. A checkpoint or a move of a machine with memory of the second kind is refused \
         before anything stands still.",
        "put the DIMM back; or take the memory out of use (echo offline > \
         /sys/devices/system/memory/memory…/state, then unload its driver, or have the host take it back)",
    ),
    entry_of(
        Code::WatchNoHpet,
        "this machine shows no HPET with a comparator that the kernel leaves free",
        "The watch has a comparator of the HPET send NMIs to CPUs that take no interrupts any more. The \
         firmware hides the HPET, it has fewer than three comparators, or it is switched off. Without it, \
         and without a counter of cycles, a hang of all CPUs cannot be seen.",
        "switch the HPET on in the firmware, and leave out hpet=disable on the kernel's command line; \
         systemd's RuntimeWatchdogSec with a hardware watchdog resets a machine that hangs",
    ),
    entry_of(
        Code::WatchHpetBusy,
        "another program uses the comparator of the HPET",
        "The watch takes the last comparator. A program that has /dev/hpet open, or another driver, has \
         started it.",
        "end that program (`fuser /dev/hpet` shows it), and try again",
    ),
    entry_of(
        Code::WatchRemapped,
        "an IOMMU remaps interrupts, and lets no NMI of the HPET through",
        "Each interrupt passes a table of the IOMMU then, and the kernel makes no entry for an NMI of a \
         module's. Counters of cycles are not concerned.",
        "nothing where counters of cycles are in use; else boot with intremap=off, if the machine needs no \
         x2APIC",
    ),
    entry_of(
        Code::WatchNoPin,
        "the I/O APIC has no free pin that the HPET can use",
        "This HPET can send no messages (FSB), and drives a pin of the I/O APIC instead. The kernel has a \
         use for each of those pins.",
        "nothing where counters of cycles are in use",
    ),
    entry_of(
        Code::WatchSilent,
        "NMIs of the HPET do not arrive",
        "The watch waits for its first NMIs before it relies on them. They did not come, or they stopped \
         later and could not be started again: the firmware or another driver uses the same comparator.",
        "`mercury guard off`, then `mercury guard on` tries again",
    ),
    entry_of(
        Code::WatchNoPmu,
        "the processor has no free counter of cycles",
        "In a virtual machine there often is none. The firmware may use the counters itself, or profilers \
         have all of them.",
        "nothing where the HPET is in use; else end profilers, or set kernel.nmi_watchdog=0, which frees the \
         counter of the kernel's own watchdog",
    ),
    entry_of(
        Code::MendNotReadOnly,
        "the kernel does not map this memory read-only",
        "The driver mends code and constants only, and those are read-only. Memory of a module that has gone \
         meanwhile is not mapped at all.",
        "nothing: the next pass looks again",
    ),
    entry_of(
        Code::MendChanged,
        "the memory holds other bytes by now",
        "The kernel, or somebody else, has changed them since the pass read them. The driver has written \
         nothing.",
        "nothing: the next pass looks again",
    ),
    entry_of(
        Code::IntegrityUnreadable,
        "the kernel's code cannot be read or compared",
        "/proc/kcore shows it, unless the kernel is locked down for confidentiality or was built without it. \
         /proc/kallsyms, /proc/modules and /sys/module have to show addresses too, and the copy needs some \
         10 MB in /run/mercury/integrity. The kernel's records of its own changes come from perf \
         (perf_event_open). The message has the system's own reason. \
         A kernel that counts calls (retbleed=stuff) changes them in ways that are not known.",
        "boot without lockdown=confidentiality, make room in /run, or set scrub = \"off\" in guard.toml",
    ),
    entry_of(
        Code::SwapInUse,
        "memory is swapped out, and there is no room to read it back",
        "An image, or a move, has only the contents of memory. Pages that are swapped out lie on a disk \
         and would be missing. So they are read back, which needs room in memory, and below the limits of \
         the control groups that they belong to: the kernel would end programs there.",
        "stop programs until there is room for it in memory, or raise the limit of the named control group; \
         try again",
    ),
    entry_of(
        Code::DevicesUnseen,
        "a device that is in use writes to memory that the driver cannot see",
        "GPUs, RDMA, devices that processes drive by themselves (VFIO, vDPA, DPDK) and accelerators that \
         share the memory of processes write without asking the kernel each time. Their writes during the \
         instant would be missing.",
        "end the processes that are named, or unload the drivers of the devices; --force-devices goes on \
         anyway, which is right only if the devices are idle",
    ),
    entry_of(
        Code::CpusOffline,
        "CPUs are present and offline",
        "A CPU that is offline waits in memory that a restore writes over, so such a machine could not be \
         brought back.",
        "bring them online (`echo 1 > /sys/devices/system/cpu/cpuN/online`), or boot without nosmt and \
         maxcpus; `mercury checkpoint --force-offline` makes an image that can only be inspected",
    ),
    entry_of(
        Code::WatchdogUnfed,
        "a watchdog cannot be fed while its program stands still",
        "While programs stand still Mercury feeds their watchdogs, by a copy of each program's \
         descriptor. During the instant itself no process runs, so a watchdog with a timeout under 5 s \
         would reset the machine then. And if the kernel forbids tracing of other processes \
         (kernel.yama.ptrace_scope=3), Mercury gets no copy of the descriptor.",
        "give the watchdog 5 s or more (systemd: RuntimeWatchdogSec=), or disarm it",
    ),
    entry_of(
        Code::CardsBundled,
        "a network card is a part of a bond or a team",
        "The cards of the destination have other addresses, and a bond would keep the source's.",
        "take bonds and teams apart before the move, and make them again after it",
    ),
    entry_of(
        Code::DisksStayBehind,
        "local disks can be written to, and a rollback puts back memory only",
        "The kernel, a virtual machine or a program would use its memory of a disk that has changed since, \
         and destroy what is on it.",
        "mount file systems read-only, or run from RAM or the network; stop programs that write to raw \
         disks; deactivate thin pools and caches; if the disks can go back too (a device-mapper snapshot, made by \
         --hook and merged by --put-back), use --force-disks",
    ),
    entry_of(
        Code::NfsSessions,
        "a file system is on NFS 4.1 or later, which survives neither a rollback nor a restore of a machine \
         that ran on",
        "NFS 4.1 and later number their requests. A client that falls behind its server never recovers.",
        "mount it with vers=4.0 or vers=3; `mercury checkpoint --poweroff` needs neither, and \
         `mercury checkpoint --force-devices` makes an image that is only to be inspected",
    ),
    entry_of(
        Code::DisksUncomparable,
        "Mercury cannot tell if a file system is unchanged since the instant",
        "Memory must never be restored beside a disk that has changed since. The restore environment \
         compares each file system's fingerprint with that of the instant. It reaches only disks that the \
         drivers of this machine's cards find by themselves.",
        "unmount it; or --force-devices goes on with a checkpoint: `mercury restore` then needs \
         --force-disks, and you must know if the disks are unchanged",
    ),
    entry_of(
        Code::NoPlaceForTombstone,
        "there is no place for a tombstone that keeps this machine from starting while it runs at the \
         destination",
        "After a power cut this machine would start from disks that it shares with the machine that it \
         has moved to. The tombstone is a variable of UEFI firmware, or a file on a local disk.",
        "`mercury tombstone --prepare FILE` makes a place on a local disk; --without-tombstone moves without \
         a tombstone: then make sure that this machine does not start by itself when its power comes back",
    ),
    entry_of(
        Code::DisksUnheld,
        "a disk or a file system is in use where this command cannot hold it still",
        "The kernel goes on writing to such a disk after the instant. A machine that is brought back would \
         destroy it. The disk may belong to ZFS or to several disks, to another mount namespace, or to no \
         mount table at all. A program, which would stand still itself, may write the metadata of an array.",
        "end the programs that use the disk, or unmount its file system. A file system that was unmounted \
         with `umount -l` lives until its last file is closed; mount one of a container or of `fsmount()` in \
         the system's own namespace as well; export a pool of ZFS",
    ),
    entry_of(
        Code::DriverMissing,
        "the driver is not installed for the running kernel",
        "The package builds the driver by DKMS for each kernel whose headers are installed.",
        "`dkms status mercury` shows the kernels that have a driver; install the package, and the headers \
         of the running kernel, then `dkms autoinstall`; or name the driver's file with --module or \
         MERCURY_MODULE",
    ),
    entry_of(
        Code::NoModprobe,
        "there is no modprobe command",
        "The driver is loaded by modprobe, which finds it and what it needs.",
        "install it (`apt install kmod`), or name the driver's file with --module or MERCURY_MODULE",
    ),
    entry_of(
        Code::DriverForeign,
        "the driver was built for another kernel",
        "A module fits one build of the kernel.",
        "build it for the running kernel: `dkms autoinstall`",
    ),
    entry_of(
        Code::MemoryForgotten,
        "a restart forgets memory of this machine until a driver has set it up",
        "Memory of CXL devices is there only after its driver has set it up. The restore environment would \
         have to put frames there before that.",
        "take the memory out of use (`cxl disable-region`); --force-devices goes on anyway, which is right \
         only if the memory is not in use",
    ),
    entry_of(
        Code::BadRules,
        "the file with the guard's rules has a mistake",
        "A rule that is not understood would not be kept. So mercuryd and `mercury guard on` refuse the \
        whole file, and name the line and the key.",
        "correct the line; /usr/share/doc/mercury/examples/guard.toml explains each key",
    ),
    entry_of(
        Code::SensorAlarm,
        "a sensor of the hardware has passed its limit",
        "Corrected errors, alarms of temperature, fans and voltages, and disks that report their own end \
         often come before a failure. The event names the sensor, the part and the count. By default it is \
         only reported.",
        "look at the part that the event names; move the machine (`mercury evacuate`) before it fails; raise \
         the limit in [sensors.limits] if the part is sound",
    ),
    entry_of(
        Code::SensorSilent,
        "a sensor of the hardware does not answer",
        "A program (smartctl, ipmitool), a disk or a file in /sys has not answered in time. No alarm of this \
         sensor can come meanwhile. The other sensors are not concerned.",
        "run the program by hand; a disk that does not answer may be failing; leave the sensor out by \
         [sensors] use = [...] if this machine has no use for it",
    ),
    entry_of(
        Code::ServiceSilent,
        "a service has failed, or has given no heartbeat in time",
        "The service is in a [[service]] of the guard's rules. Either its unit is in the state `failed` or \
         does not get on, or the program has sent no WATCHDOG=1 for its patience.",
        "look at the service (`systemctl status`, `journalctl -u`); raise patience_s if it is slow by nature",
    ),
    entry_of(
        Code::NoDestination,
        "there is no machine to move to",
        "An order to move needs a destination that waits in `mercury receive`, and its pairing token.",
        "set MERCURY_DESTINATION in /etc/default/mercuryd, or a [[spare]] in /etc/mercury/guard.toml, and \
        put the pairing token into its file",
    ),
    entry_of(
        Code::RollbackInVain,
        "rollbacks for services have not helped",
        "The machine was put back to its snapshot three times, and the service failed again. A fourth time \
         would end the same way. The service's failure is reported instead.",
        "look at the service; a new snapshot (`mercury snapshot`) allows rollbacks again",
    ),
    entry_of(
        Code::GuestProcessor,
        "the host's processor is of another vendor or family",
        "A running kernel has chosen its code, its workarounds and its registers by the processor on which \
         it was booted.",
        "choose a host with a processor of the same vendor and family",
    ),
    entry_of(
        Code::GuestFeatures,
        "the machine's kernel uses features of the processor that this host does not offer to guests",
        "The kernel and its programs have decided at their start which instructions they use, and do not \
         look again.",
        "choose a host whose processor and KVM have the named features; a newer kernel offers more of them",
    ),
    entry_of(
        Code::GuestCpus,
        "the machine has more processors, or larger identifiers of processors, than a guest may have",
        "KVM limits the number of a guest's processors. An interrupt reaches identifiers up to 254 without \
         remapping. A kernel that was booted on hardware spins for its other processors, also for those that \
         a host with fewer does not run.",
        "take a machine with more processors than the host gives by `--overcommit-cpus`; or switch \
         processors off before the checkpoint or the move (`echo 0 > \
         /sys/devices/system/cpu/cpuN/online`), or choose another host",
    ),
    entry_of(
        Code::GuestDevices,
        "a device of the machine does not let it go on without the device",
        "Drivers of virtio devices on PCI wait for ever for a device that is gone. A device that was given \
         to a guest of the machine's own does not come along either.",
        "end guests that use the named devices, before the checkpoint or the move; a virtual machine with \
         virtio devices on PCI can only be restored where it has them (`mercury restore`)",
    ),
    entry_of(
        Code::GuestIommu,
        "the machine uses an IOMMU",
        "The kernel waits for the IOMMU's registers when it resumes, and a guest has none yet.",
        "boot the machine with `iommu=off` (and `intremap=off` on Intel) before the checkpoint or the move",
    ),
    entry_of(
        Code::GuestDisks,
        "a file system is mounted from a disk that does not come along, or a swap area is on it",
        "A guest has only those of the machine's own disks whose contents are given and fit, on controllers \
         that a guest can have. The kernel would lose the file system. Disks of iSCSI belong here as well: a \
         process has to connect them again, and could not be read from them. Disks and file systems on \
         servers come along by themselves, and so two lives of one image would both write to them.",
        "give the content of each disk on NVMe and AHCI with `--disk NAME=FILE`, as it was at the instant, \
         or in a move take it along (`mercury migrate --with-disk`, `receive --beside --disk-folder`); \
         unmount other file systems and switch other swap areas off (`swapoff DEVICE`) before; root may lie \
         in RAM, on NFS, on NBD or on NVMe over TCP as well, if the checkpoint has powered the \
         machine off",
    ),
    entry_of(
        Code::GuestMemory,
        "the host has too little memory available for the machine",
        "The kernel of a guest may use all of its memory at any time, and a host without memory ends \
         programs. For a machine that arrives (`receive --beside`), memory that your other guests and \
         arrivals have and do not use yet is not available. Guests of other users are not seen. For an \
         image (`restore --as-guest`) only the memory that is available now counts, because guests of one \
         image may share it. With `--memory-limit` nothing but that limit counts. If memory of the host is \
         short later, its kernel may end any program, guests too. Of a guest that is being moved away it \
         ends the monitor's copy of memory first, and the guest goes on.",
        "end other programs or guests of the host, or choose a host with more memory; an arrival is taken \
         all the same with `mercury receive --beside --memory-limit SIZE`",
    ),
    entry_of(
        Code::GuestTimers,
        "KVM cannot let the machine's timers count at their rate, or alike on all processors",
        "The kernel has measured the rates when it was booted, and does not measure them again. Timers would \
         be late, or clocks wrong. A host whose own kernel finds that its time-stamp counters differ would \
         let time go back between a guest's processors.",
        "choose a host with another kernel or processor, or restore the machine on its own hardware \
         (`mercury restore`)",
    ),
    entry_of(
        Code::GuestFirmware,
        "the monitor cannot stand in for the firmware of the machine",
        "A running kernel reads tables and calls methods of ACPI. Their memory has to be in the image, and \
         they have to describe a PC with fixed hardware.",
        "make the checkpoint again with this release, without lockdown; other firmware is not supported",
    ),
    entry_of(
        Code::GuestIncremental,
        "the image holds only what has changed since its parent",
        "A guest is loaded from one image that holds all memory.",
        "merge the image with its parents (`mercury merge`)",
    ),
    entry_of(
        Code::GuestDescription,
        "the image describes a machine that cannot exist, or cannot be a guest",
        "Addresses in the description lie outside of the machine's memory, or where the monitor has its own. \
         Nothing in an image is trusted.",
        "check the image with `mercury inspect`, or restore it on its own hardware (`mercury restore`)",
    ),
    entry_of(
        Code::GuestDrivers,
        "the machine's kernel has no driver for a device of a guest",
        "A guest's network card and new disks are virtio devices. A guest may have no disk from which it \
         could load their drivers. So they are loaded before the instant.",
        "install the kernel's whole package on the machine (`modprobe -a virtio_mmio virtio_net virtio_blk \
         virtio_rng` must succeed there), and make the checkpoint or the move again; or leave out --net and \
         new disks",
    ),
    entry_of(
        Code::RestoreUnfit,
        "a restore environment on this machine would refuse the image",
        "The environment has the kernel and the drivers that it needs to bring a machine back, and no \
         others. Devices that another driver makes are missing there: virtual functions of a card (SR-IOV). \
         Or the initial RAM disk on this machine brings other microcode than the machine runs with. Or the \
         environment that was prepared for this image is older than the kernel, Mercury or the microcode \
         here.",
        "prepare the environment again (`mercury restore --prepare DIR IMAGE`); take the named devices \
         out of use (virtual functions of a card: echo 0 > /sys/bus/pci/devices/…/sriov_numvfs); or go on \
         with --force-devices, for an image that is only to be inspected",
    ),
];

#[must_use]
pub fn entry(code: Code) -> &'static Entry {
    const FALLBACK: Entry = entry_of(Code::Ok, "an unexplained code", "", REPORT);
    TABLE.iter().find(|entry| entry.code == code).unwrap_or(&FALLBACK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_explained_once_and_in_order() {
        let codes: Vec<_> = TABLE.iter().map(|entry| entry.code).collect();
        assert_eq!(codes, Code::ALL);
    }

    #[test]
    fn explanations_are_sentences() {
        for entry in TABLE {
            assert!(!entry.meaning.ends_with('.'), "{:?}", entry.code);
            assert!(entry.why.ends_with('.'), "{:?}", entry.code);
            assert!(!entry.remedy.is_empty() && !entry.remedy.ends_with('.'), "{:?}", entry.code);
        }
    }

    /// `relocate/guest` counts memory (`fit.rs`) and lets the kernel end a copy first (`calls/keeper.rs`).
    #[test]
    fn memory_of_guests_is_explained_as_it_is_counted_and_defended() {
        let text_of = |code| {
            let entry = TABLE.iter().find(|entry| entry.code == code).expect("an entry");
            format!("{}. {} {}", entry.meaning, entry.why, entry.remedy)
        };
        let expected: [(Code, &[&str]); 4] = [
            (
                Code::GuestMemory,
                &["do not use yet", "other users", "--memory-limit SIZE", "copy of memory first"],
            ),
            (Code::SnapshotLost, &["copy on the host", "before the guest"]),
            (Code::SnapshotLive, &["copy of an earlier move"]),
            (Code::NoMemory, &["copy of its monitor on the host"]),
        ];
        for (code, words) in expected {
            let text = text_of(code);
            words.iter().for_each(|words| assert!(text.contains(words), "{words}: {text}"));
        }
    }
}
