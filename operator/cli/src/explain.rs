//! Every code: what it means, why Mercury stops there, and what to do.

use crate::{
    error::Error,
    exit::Exit,
    output::{Render, Tone},
};
use clap::{
    Arg, Command,
    builder::{PossibleValue, StringValueParser, TypedValueParser},
};
use mercury_abi::code::Code;
use serde::Serialize;
use std::ffi::OsStr;

/// The explanation of one code.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The code.
    pub code: Code,
    /// What it means: a sentence without a full stop.
    pub meaning: &'static str,
    /// Why it matters.
    pub why: &'static str,
    /// What to do.
    pub remedy: &'static str,
}

const fn entry_of(code: Code, meaning: &'static str, why: &'static str, remedy: &'static str) -> Entry {
    Entry { code, meaning, why, remedy }
}

const REPORT: &str =
    "this is a bug: please report it with the output of `mercury status --json` and `mercury log`";
const RELOAD: &str = "look at `mercury status` and `mercury log`, then `mercury unload` and `mercury load`";

/// All of them, in numerical order.
pub const TABLE: &[Entry] = &[
    entry_of(Code::Ok, "it worked", "Nothing was refused.", "nothing"),
    entry_of(
        Code::AbiMismatch,
        "command, driver and hypervisor are of different versions",
        "Each structure that crosses into the kernel carries its size and version. Where they differ the \
         request is refused rather than misread.",
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
        "The hypervisor's memory cannot go while a CPU runs on it.",
        "run `mercury detach` first, or `mercury unload --detach`",
    ),
    entry_of(
        Code::Busy,
        "another process controls Mercury",
        "One process at a time may change modes, so that nobody switches beneath somebody else's feet.",
        "wait until it is done, or end it; `mercury status` shows which one it is",
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
        "attach again when it has started",
    ),
    entry_of(
        Code::BadImage,
        "the hypervisor in the driver is damaged or from another build",
        "The image carries its version and layout; nothing is executed that does not match.",
        "build and install the driver again: `dkms remove mercury --all`, then reinstall the package",
    ),
    entry_of(
        Code::UnknownOperation,
        "an operation that the hypervisor does not know",
        "Driver and hypervisor are built together; this happens with a mixture of builds.",
        "install the driver again; if it stays, report it as a bug",
    ),
    entry_of(
        Code::Crashed,
        "the hypervisor crashed and was taken out",
        "Every CPU went back to native and the system runs on, but the hypervisor's memory is no longer \
         trusted.",
        RELOAD,
    ),
    entry_of(
        Code::OrphanedHypervisor,
        "CPUs are above a hypervisor whose driver is gone",
        "The driver was removed while a CPU did not leave the hypervisor. The system runs on above it, but no driver can \
         reach it any more: the way out of it was in the memory of the one that is gone.",
        "reboot; until then KVM and other hypervisors find the hardware taken",
    ),
    entry_of(
        Code::LockedDown,
        "the kernel is locked down",
        "With integrity lockdown, which Secure Boot switches on, nobody may replace the kernel's memory: no machine is \
         restored or received here. With confidentiality lockdown nobody may read it either: there is no checkpoint, and \
         the machine cannot move. Attaching, and snapshots that stay in memory, are allowed.",
        "boot without `lockdown=` (and without Secure Boot, if that is what asks for it), or do this on another machine; \
         `cat /sys/kernel/security/lockdown` shows the mode",
    ),
    entry_of(
        Code::NoContiguousMemory,
        "there is too little physically contiguous memory",
        "The hypervisor's image and each CPU's area lie in one piece of physical memory.",
        "`echo 3 > /proc/sys/vm/drop_caches; echo 1 > /proc/sys/vm/compact_memory`, then try again; at \
         boot there is always enough: `systemctl enable mercury`",
    ),
    entry_of(
        Code::NoMemory,
        "there is too little memory",
        "The hypervisor needs at most 4 MiB and 64 KiB for each possible CPU.",
        "free some memory and try again",
    ),
    entry_of(
        Code::NeedPages,
        "the nested tables need more pages",
        "The driver donates pages and asks again; this should never be seen outside.",
        REPORT,
    ),
    entry_of(
        Code::More,
        "building is not finished",
        "The driver calls again until it is; this should never be seen outside.",
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
        "Without hardware virtualization there is nothing that a hypervisor could be slipped in with.",
        "in a virtual machine, ask for nested virtualization (QEMU: -cpu host or EPYC,+svm)",
    ),
    entry_of(
        Code::SvmDisabled,
        "SVM is disabled by firmware",
        "The processor has it, but the firmware switched it off (VM_CR.SVMDIS).",
        "enable \"SVM Mode\" (or \"Virtualization\") in the firmware's setup and reboot",
    ),
    entry_of(
        Code::NoNestedPaging,
        "the processor has no nested paging",
        "Without it every page-table change of the kernel would have to be intercepted.",
        "in a virtual machine, switch it on (QEMU: +npt); no AMD processor since 2007 lacks it",
    ),
    entry_of(
        Code::NoAsids,
        "there are fewer than two address-space identifiers",
        "The running system needs one besides the hypervisor's own (0).",
        "this is a fault of the emulation or of another hypervisor beneath: report it there",
    ),
    entry_of(
        Code::InitRedirected,
        "INIT is redirected (VM_CR.R_INIT)",
        "Somebody turned INIT into an exception, which is what a hypervisor does that is already here.",
        "remove the other hypervisor, or reboot",
    ),
    entry_of(
        Code::VirtualizationInUse,
        "hardware virtualization is in use already",
        "A CPU has one hypervisor at a time. KVM of Linux 6.12 takes the hardware as soon as it is \
         loaded, even without a virtual machine. On AMD KVM alone goes on above Mercury, and only where no module of \
         another hypervisor (VirtualBox's vboxdrv, VMware's vmmon) could be the one that has it.",
        "unload the other hypervisor; if it is KVM, and no virtual machine runs: `mercury attach --unload-kvm`, or `modprobe -r kvm_amd kvm` (kvm_intel on \
         Intel); for good: put `options kvm enable_virt_at_load=0` into /etc/modprobe.d/mercury.conf and reboot",
    ),
    entry_of(
        Code::IntelUnsupported,
        "the number of a refusal that no version gives any more",
        "It once stood for processors by Intel. They are supported, and refused by name where they lack something that \
         Mercury needs (no-vmx, no-ept and others).",
        "install the command and the driver from the same release; `mercury doctor` says what this processor lacks",
    ),
    entry_of(
        Code::Cr0Unsupported,
        "CR0 holds a bit or a combination that Mercury does not carry over",
        "The whole of the processor's state is carried across the switch; a bit that is not known might \
         be lost.",
        "disabled caches or emulated floating point are not normal on a running system: reboot; if it \
         stays, report it",
    ),
    entry_of(
        Code::Cr4Unsupported,
        "CR4 holds a bit that Mercury does not carry over",
        "Each CR4 bit is a feature with state of its own. A bit that is not known might lose that state.",
        "switch the named feature off on the kernel's command line, or report it with the processor's model",
    ),
    entry_of(
        Code::EferUnsupported,
        "EFER holds a bit that Mercury does not carry over",
        "Each EFER bit changes how the processor works; unknown ones might be lost.",
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
        "Extended state stays in the processor across a switch; that was checked for each known component.",
        "boot with `clearcpuid=` for the feature, or report it with the processor's model",
    ),
    entry_of(
        Code::SupervisorCet,
        "the kernel itself uses shadow stacks, or branch tracking where it cannot be carried",
        "Their state changes with each instruction of the switch.",
        "boot without kernel shadow stacks; where it is branch tracking, with `ibt=off`",
    ),
    entry_of(
        Code::MemoryEncryption,
        "memory encryption (SME) is active",
        "Every address of the kernel carries the encryption bit, and the hypervisor's would have to too.",
        "boot with `mem_encrypt=off`; transparent encryption (TSME) in the firmware does no harm",
    ),
    entry_of(
        Code::SnpEnabled,
        "this host is set up for SEV-SNP guests",
        "The reverse map checks every page that a hypervisor uses.",
        "disable SEV-SNP in the firmware's setup, or boot with `kvm_amd.sev_snp=0` and reboot",
    ),
    entry_of(
        Code::PatUnsupported,
        "entry 0 of the PAT is not write-back",
        "Nested tables use entry 0 for all memory; all of it would become slow or incoherent.",
        "Linux always programs it so: find out what changed it, and reboot",
    ),
    entry_of(
        Code::TscRatio,
        "the TSC ratio is not 1.0",
        "The clock would jump at attach. An earlier hypervisor left the value behind.",
        "load and unload kvm_amd once (it resets the ratio), or reboot",
    ),
    entry_of(
        Code::InvlpgbInUse,
        "the kernel broadcasts TLB invalidations with INVLPGB",
        "A broadcast of a native CPU does not reach the translations of an attached one.",
        "boot with `clearcpuid=invlpgb`",
    ),
    entry_of(
        Code::MachineCheckInProgress,
        "a machine check is in progress",
        "The processor has just reported a hardware error.",
        "look at `dmesg` for the error, and mend the hardware",
    ),
    entry_of(
        Code::PageTableIsolation,
        "the kernel isolates its page tables (PTI)",
        "AMD processors do not need it; somebody asked for it with pti=on.",
        "boot without `pti=on`",
    ),
    entry_of(
        Code::SingleStep,
        "somebody single-steps the switch",
        "A debug exception inside the switch would arrive with half of the state changed.",
        "stop the kernel debugger",
    ),
    entry_of(
        Code::MemoryBeyondMap,
        "physical memory reaches beyond the nested map",
        "The map covers the physical address width, and 48 bits with four-level paging.",
        "boot with five-level paging (no `no5lvl`), or keep the firmware from placing devices that high \
         (\"Above 4G decoding\")",
    ),
    entry_of(
        Code::CpusDiffer,
        "a CPU differs from the first one in something that the hypervisor relies on",
        "One set of tables and one set of features serve all CPUs.",
        "update the firmware or the microcode so that all CPUs are equal, and reboot; or attach only the \
         equal ones with --cpus",
    ),
    entry_of(
        Code::KernelUntested,
        "this kernel is of a series that Mercury was never tested on",
        "The tests run on Debian's 6.1 and 6.12.",
        "run Debian 12's 6.1 or Debian 13's 6.12; to try all the same: `mercury attach --force`",
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
        "It changes how every interrupt and exception arrives.",
        "boot without `fred=on`",
    ),
    entry_of(
        Code::PrivilegedLayer,
        "Xen or another privileged layer is beneath this kernel",
        "It owns the machine; Mercury would take it away.",
        "boot Linux without that layer",
    ),
    entry_of(
        Code::InsideHypervisor,
        "this machine is itself a virtual machine",
        "Mercury works, but each world switch is emulated by the hypervisor beneath and takes 20 to 50 µs.",
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
        "A check that cannot be made is not taken as passed.",
        "in a virtual machine, the hypervisor beneath does not emulate it: use another CPU model or version",
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
        "The kernel expects them equal; memory may be slow on some CPUs, with or without Mercury.",
        "update the firmware; attach is not affected",
    ),
    entry_of(
        Code::DebugActive,
        "branch recording or hardware breakpoints are active",
        "They go on working; recorded branches may include the hypervisor's.",
        "nothing",
    ),
    entry_of(
        Code::HsaveInUse,
        "VM_HSAVE_PA is not zero: somebody used SVM before",
        "The value is put back at detach.",
        "nothing; unload the other hypervisor's module if it is not needed",
    ),
    entry_of(
        Code::SelfTestFailed,
        "the self-test on the first CPU failed",
        "The first CPU attaches alone and reads its state as before; something was not the same.",
        REPORT,
    ),
    entry_of(
        Code::ErapsInUse,
        "the kernel relies on the processor to protect return predictions (ERAPS)",
        "What the processor does by itself for a native kernel it does in part only for an attached one.",
        "boot with `clearcpuid=664`",
    ),
    entry_of(
        Code::NoVmx,
        "the processor reports no VMX",
        "Without hardware virtualization there is nothing that a hypervisor could be slipped in with.",
        "in a virtual machine, ask for nested virtualization (QEMU: -cpu host,+vmx)",
    ),
    entry_of(
        Code::VmxDisabled,
        "VMX is disabled by firmware",
        "The processor has it, but IA32_FEATURE_CONTROL does not allow it outside of SMX, or is not locked.",
        "enable \"VT-x\" (or \"Virtualization\") in the firmware's setup and switch the machine off and on",
    ),
    entry_of(
        Code::NoEpt,
        "the processor has no extended page tables",
        "Without them every page-table change of the kernel would have to be intercepted.",
        "use a machine with an Intel processor of 2010 (Westmere) or later; in a virtual machine, switch EPT on",
    ),
    entry_of(
        Code::NoUnrestrictedGuest,
        "the processor has no unrestricted guest",
        "A CPU that is reset starts in real mode, and must be able to do so with the hypervisor beneath.",
        "use a machine with an Intel processor of 2010 (Westmere) or later",
    ),
    entry_of(
        Code::EptUnsupported,
        "the extended page tables lack something that Mercury needs",
        "The map wants write-back tables of four levels, 2 MiB pages, and INVEPT for all contexts.",
        "no processor with EPT is known to lack them: look at the emulation or the hypervisor beneath",
    ),
    entry_of(
        Code::VmxControlForced,
        "VMX demands a control that Mercury does not know",
        "A control that must be set changes what the system sees, and what it does is not known.",
        "report it with the processor's model",
    ),
    entry_of(
        Code::VmxControlMissing,
        "VMX lacks a control that Mercury needs",
        "Without it state of the running system would be lost at each exit.",
        "in a virtual machine, ask for more of VMX (QEMU: -cpu host); otherwise report it with the model",
    ),
    entry_of(
        Code::VmxInstructionLost,
        "an instruction that the kernel may use would be undefined under VMX",
        "CPUID announces it, and the control that permits it to a guest is missing or not known.",
        "boot with `clearcpuid=` for the feature, or report it with the processor's model",
    ),
    entry_of(
        Code::VmxFixedBits,
        "VMX does not allow CR0 or CR4 as they are",
        "In VMX operation some bits of them are fixed.",
        "switch the named feature off on the kernel's command line, or report it with the processor's model",
    ),
    entry_of(
        Code::ProcessorTrace,
        "processor trace is running",
        "On this processor it cannot run in VMX operation: attaching would stop it.",
        "end the trace (`perf record -e intel_pt//`), then attach",
    ),
    entry_of(
        Code::VmxRegion,
        "VMX wants its memory of another kind",
        "Its control structures must not lie in write-back memory, or only below 4 GiB.",
        "no processor with EPT is known to want that: look at the emulation or the hypervisor beneath",
    ),
    entry_of(
        Code::DebugStore,
        "the processor stores records of samples or branches (PEBS, BTS)",
        "It writes them to virtual addresses, through the hypervisor's page tables too while that runs, which do \
         not map them. A CPU that is attached leaves when it begins.",
        "end the recording, or let perf sample without them (`perf record -e cycles` and not `cycles:P`), then attach",
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
        "a CPU is not in the mode in which it should be after the switch",
        "The mode is asked of the CPU after each switch. Everything was rolled back.",
        REPORT,
    ),
    entry_of(
        Code::HostException,
        "the hypervisor's own code raised an exception",
        "The CPU was detached with the system's state intact; `mercury status` has the record.",
        REPORT,
    ),
    entry_of(
        Code::HostPanic,
        "the hypervisor's own code panicked",
        "The CPU was detached with the system's state intact; `mercury status` has the record.",
        REPORT,
    ),
    entry_of(
        Code::UnknownExit,
        "the CPU left for a reason that the hypervisor does not know",
        "Rather than guess, it detached the CPU and let the processor execute the instruction natively.",
        REPORT,
    ),
    entry_of(
        Code::SvmReleased,
        "the kernel switched SVM off on this CPU",
        "Clearing EFER.SVME or VM_HSAVE_PA is taken as a wish to detach: the kernel does it on a crash, a \
         forced reboot, or when it unloads KVM.",
        "unload KVM, or attach again when the other user is gone",
    ),
    entry_of(
        Code::MicrocodeUpdate,
        "the kernel loaded microcode",
        "A microcode update must run on the bare processor, so the CPU detached itself before it.",
        "run `mercury doctor` (the update may have changed features), then attach again",
    ),
    entry_of(
        Code::CpuReset,
        "the CPU was reset while it was attached",
        "A reset ends the hypervisor's hold on the CPU.",
        "attach again; if nobody reset the CPU, look for errors of the firmware in `dmesg`",
    ),
    entry_of(
        Code::NestedMapExhausted,
        "the nested tables could not be extended",
        "A device was used at an address that lay outside everything the kernel knew at load, and the \
         donated pages ran out. The CPU was detached.",
        "unload and load the hypervisor while that device is present",
    ),
    entry_of(
        Code::VmxReleased,
        "the kernel switched VMX off on this CPU",
        "VMXOFF, and clearing CR4.VMXE, are taken as a wish to detach: the kernel does it on a crash, a forced \
         reboot, or when it unloads KVM.",
        "unload KVM, or attach again when the other user is gone",
    ),
    entry_of(
        Code::MtrrChanged,
        "the kernel changed an MTRR",
        "Under VMX the nested tables say of what type memory is, and they repeat the MTRRs of the load.",
        "unload and load the hypervisor, then attach again",
    ),
    entry_of(
        Code::GuestUnsupported,
        "a virtual machine of KVM's cannot run beneath Mercury",
        "Its memory or registers are encrypted (SEV), interrupts reach it without an exit (AVIC), or the processor has \
         no address-space identifier left. The CPU that was to run it detached itself, and runs it natively.",
        "stop that virtual machine, or set `kvm_amd.avic=0`, and attach again",
    ),
    entry_of(
        Code::SnapshotLive,
        "there is a snapshot of memory",
        "What was asked for cannot be had beneath one.",
        "wait for what needs the snapshot, or end it; `mercury snapshot --drop` gives up one that is kept",
    ),
    entry_of(
        Code::NoSnapshot,
        "there is no snapshot of memory",
        "It has ended, or never began.",
        "begin one first: `mercury snapshot`",
    ),
    entry_of(
        Code::SnapshotMissed,
        "not every CPU came to the instant of the snapshot",
        "All CPUs meet in the hypervisor for a moment; one did not come within a second or two. The machine runs on \
         without a snapshot.",
        "try again; look for a CPU that is held up (`mercury status`, a virtual machine beneath this one)",
    ),
    entry_of(
        Code::SnapshotPool,
        "the pool had no page left for what the snapshot had to keep",
        "The machine wrote more pages than there was room for copies, so the snapshot was given up. The machine \
         itself lost nothing.",
        "free memory, let the machine do less meanwhile, or stream to something faster",
    ),
    entry_of(
        Code::SnapshotLost,
        "a CPU left the hypervisor beneath a snapshot",
        "What it wrote from then on nobody saw, so the snapshot was given up. The machine itself lost nothing.",
        "look at `mercury log` for why it left, and try again",
    ),
    entry_of(
        Code::SnapshotDevices,
        "the driver cannot see what devices are given to write",
        "Devices write to memory without asking the nested tables, so the driver looks at what the kernel gives them, \
         by ftrace. It could not, or the first virtual device came while it looked.",
        "boot a kernel with CONFIG_DYNAMIC_FTRACE_WITH_REGS and CONFIG_KPROBES, set the sysctl kernel.ftrace_enabled to 1, \
         and try again",
    ),
    entry_of(
        Code::SnapshotQuiesce,
        "the kernel could not stop its tasks and devices for the instant",
        "A task did not freeze, or a driver refused to suspend its device. The machine runs on.",
        "`dmesg` names the task or the driver",
    ),
    entry_of(
        Code::SnapshotHotplug,
        "a CPU or memory came or went, or memory broke, between a snapshot's beginning and its end",
        "A CPU that comes starts without the hypervisor, so what it writes nobody sees; and memory that the kernel has \
         found broken cannot be read: the snapshot was given up. The machine itself lost nothing.",
        "try again, broken memory is left out then; `mercury snapshot` keeps another one",
    ),
    entry_of(
        Code::FenceUnsupported,
        "this kernel has no hooks for packets, so the network cannot be fenced off",
        "From the instant on the machine must not answer its peers, for it goes on from there later. The driver stops \
         packets by netfilter's hooks.",
        "boot a kernel with CONFIG_NETFILTER, or take the network down by hand and say --no-fence",
    ),
    entry_of(
        Code::SnapshotGuest,
        "a virtual machine ran that the snapshot, or the log of writes, cannot see",
        "KVM runs it without nested paging, its memory is encrypted (SEV), or interrupts reach it without an exit \
         (AVIC): it writes round the tables of the snapshot or the log, which was given up. The machine itself lost nothing.",
        "shut such virtual machines down first, or load kvm_amd with npt=1 and avic=0",
    ),
    entry_of(
        Code::SnapshotSwap,
        "memory was swapped out to a disk at the instant",
        "What is on a swap disk is in no image and in no snapshot. `mercury` switches swap off before the instant, and on          again after it; an area was switched on meanwhile. Nothing was kept, and the machine runs on.",
        "find what runs `swapon` on this machine (`swapon --show`), and try again",
    ),
    entry_of(
        Code::RollbackUnsupported,
        "this version cannot put a machine with this processor back to a snapshot",
        "Fetching CPUs and setting their state is done for AMD's processors only, so far.",
        "use `mercury checkpoint`, which works on this processor",
    ),
    entry_of(
        Code::RollbackMissed,
        "a CPU could not be fetched for the rollback",
        "All CPUs meet in the hypervisor before anything is put back. One did not come within a second or two, even by \
         NMI: it may be in a handler of NMIs that does not end. Nothing was put back, and the snapshot is lost.",
        "reboot if the machine is not usable",
    ),
    entry_of(
        Code::RollbackDevices,
        "there are devices that the hypervisor could not keep from writing to memory",
        "Before memory is put back all devices are silenced, by PCI's configuration ports, which reach the first \
         segment only. `dmesg` names a device in another one.",
        "disable it in the firmware, such as VMD",
    ),
    entry_of(
        Code::MacsecInUse,
        "a network device encrypts with MACsec, whose packet numbers must not be used twice",
        "A machine that is brought back, or put back, counts its packets on from the instant. Those that it sent after the \
         instant had the same numbers and the same key, so that whoever has recorded both can read them. The kernel does \
         not let the driver end MACsec's associations.",
        "delete the device (ip link delete …) before a snapshot, a checkpoint or a move, and make it again afterwards, \
         with new keys",
    ),
    entry_of(
        Code::LogUnsupported,
        "there is no log of writes on this processor, beneath this kernel, or with these devices",
        "What has changed between two rounds of a migration is told by a log of writes, so far on AMD's processors only, \
         not beneath a kernel that looks for what it wrote into free pages (page_poison=1), and not where a virtio device \
         has packed queues. Hashes of all memory tell it as well; applications stand still for longer.",
        "nothing needs to be done",
    ),
    entry_of(
        Code::DiskUnsupported,
        "of this disk there can be no log of writes",
        "What is written to a disk while it is copied is told by the block layer's requests. Partitions, zoned disks and what \
         is made of others (device mapper, RAID, NVMe with several paths) have none of their own, and a kernel without \
         tracepoints tells nobody.",
        "name the whole disk that is beneath; or move the machine with files on storage that both machines reach",
    ),
    entry_of(
        Code::DiskLogged,
        "there is a log of writes of this disk already, or of too many",
        "A disk is copied once at a time, and at most 16 disks are.",
        "name each disk once",
    ),
    entry_of(
        Code::NoDiskLog,
        "there is no log of writes of this disk",
        "What was written to it cannot be told, for nobody has noted it.",
        REPORT,
    ),
    entry_of(
        Code::RestoreCpus,
        "the CPUs of the image are not those of this machine",
        "Every CPU that was online has to be there again, with the same APIC ID, and no other.",
        "restore it where it was made, or on a machine that is equal to that; all its CPUs must be online, so boot without nosmt and maxcpus",
    ),
    entry_of(
        Code::RestoreMode,
        "paging depth or local APIC mode are not those of the image",
        "The kernel of the image was booted with other options, or on a machine with other firmware settings.",
        "boot the restore environment that `mercury restore` prepares: it takes over the options",
    ),
    entry_of(
        Code::RestoreOverlap,
        "this kernel occupies all the memory that the image needs",
        "Frames go to their own addresses, so only a small kernel can bring a machine back: one that was booted with \
         mem=.",
        "let `mercury restore` start its own environment",
    ),
    entry_of(
        Code::RestoreRoom,
        "too little memory is free beside the image",
        "What belongs where the small kernel is has to wait elsewhere: in memory that the image leaves out, or where \
         the image has only zeros.",
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
        "A driver of the restore environment refused to suspend its device. Nothing was changed; the image is as it \
         was.",
        "`dmesg` names the driver; start over",
    ),
    entry_of(
        Code::RestoreMemory,
        "the restore environment does not find memory of the image's machine",
        "Neither the firmware's memory map nor an ACPI memory device has this memory. Either a DIMM is not in the slot in \
         which the image's machine had it, or a driver makes the memory available after each boot (virtio-mem, Hyper-V, \
         CXL regions), and the environment has no such driver. A checkpoint or a move of a machine with memory of the \
         second kind is refused before anything stands still.",
        "put the DIMM back; or take the memory out of use (echo offline > /sys/devices/system/memory/memory…/state, then \
         unload its driver, or have the host take it back)",
    ),
    entry_of(
        Code::SwapInUse,
        "memory is swapped out, and there is no room to read it back",
        "An image, and what moves, is what memory holds. What is swapped out lies on a disk and would be missing.",
        "stop programs until there is room for it in memory, and try again",
    ),
    entry_of(
        Code::DevicesUnseen,
        "a device that is in use writes to memory where the driver cannot see it",
        "GPUs, RDMA, devices that processes drive by themselves (VFIO, DPDK) and accelerators that share the memory of \
         processes write without asking the kernel each time. What they write during the instant would be missing.",
        "end the processes that are named, or unload the drivers of the devices; --force-devices goes on all the same, which is \
         right only if the devices are idle",
    ),
    entry_of(
        Code::CpusOffline,
        "CPUs are there and offline",
        "A CPU that is offline waits in memory that a restore writes over, so such a machine could not be brought back.",
        "bring them online (`echo 1 > /sys/devices/system/cpu/cpuN/online`), or boot without nosmt and maxcpus; `mercury \
         checkpoint --force-offline` makes an image that can only be looked into",
    ),
    entry_of(
        Code::WatchdogUnfed,
        "a watchdog cannot be fed while its program stands still",
        "Mercury feeds watchdogs in place of their programs, which stand still, by a copy of the program's descriptor. For the \
         instant itself no process runs, so a watchdog that bites within 5 s would bite then; and where nobody may trace others \
         (kernel.yama.ptrace_scope=3) there is no copy.",
        "give the watchdog 5 s or more (systemd: RuntimeWatchdogSec=), or disarm it",
    ),
    entry_of(
        Code::CardsBundled,
        "a network card is a part of a bond or a team",
        "The cards of the other machine have other addresses, and a bond would keep its own.",
        "take bonds and teams apart before the move, and make them again after it",
    ),
    entry_of(
        Code::DisksStayBehind,
        "local file systems are mounted for writing, and a rollback puts back memory only",
        "The kernel would go on with what it remembers of file systems that have moved on, and destroy them.",
        "mount them read-only, or run from RAM or the network. Where the disks can go back too (a device-mapper snapshot, made \
         by --hook and merged by --put-back), --force-disks goes on",
    ),
    entry_of(
        Code::NfsSessions,
        "a file system is on NFS 4.1 or later, which a machine that was put back cannot go on with",
        "From NFS 4.1 on requests are numbered, and a client that falls behind its server never gets on again.",
        "mount it with vers=4.0 or vers=3",
    ),
    entry_of(
        Code::DisksUncomparable,
        "of a file system it could not be told whether it is as it was",
        "What is in memory must never meet a disk that has moved on. The restore environment compares each file system's \
         fingerprint with that of the instant, and reaches only disks that the drivers of this machine's cards find by \
         themselves.",
        "unmount it; or --force-devices goes on with a checkpoint: `mercury restore` then needs --force-disks, and you must know \
         whether the disks are as they were",
    ),
    entry_of(
        Code::NoPlaceForMark,
        "there is no place for a mark that keeps this machine from starting while it runs at the other one",
        "After a power cut this machine would start from disks that it shares with the one that it has moved to. The mark \
         is a variable of UEFI firmware, or a file on a local disk.",
        "`mercury mark --prepare FILE` makes a place on a local disk; --without-mark moves all the same: then see to it that \
         this machine does not start by itself when its power comes back",
    ),
    entry_of(
        Code::DriverMissing,
        "the driver is not installed for the running kernel",
        "The package builds the driver by DKMS for each kernel of which the headers are installed.",
        "`dkms status mercury` shows for which kernels it is there; install the package, and the headers of the running kernel, \
         then `dkms autoinstall`; or name the driver's file with --module or MERCURY_MODULE",
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
];

/// The explanation of a code.
#[must_use]
pub fn entry(code: Code) -> &'static Entry {
    const FALLBACK: Entry = entry_of(Code::Ok, "an unexplained code", "", REPORT);
    TABLE.iter().find(|entry| entry.code == code).unwrap_or(&FALLBACK)
}

/// The parser of `mercury explain CODE`. Shells complete codes from it; [`explain`] judges the word.
#[derive(Clone, Copy, Debug)]
pub struct Codes;

impl TypedValueParser for Codes {
    type Value = String;

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let value = |entry: &Entry| PossibleValue::new(entry.code.name()).help(entry.meaning);
        Some(Box::new(TABLE.iter().map(value)))
    }
}

/// What `mercury explain` prints.
#[derive(Debug, Serialize)]
pub struct Explanations {
    codes: Vec<Explanation>,
}

#[derive(Debug, Serialize)]
struct Explanation {
    code: &'static str,
    number: u32,
    exit: u8,
    meaning: &'static str,
    why: &'static str,
    remedy: &'static str,
}

/// The explanation of the named or numbered code, or of all.
pub fn explain(wanted: Option<&str>) -> Result<Explanations, Error> {
    let codes: Vec<_> = TABLE.iter().filter(|entry| matches(entry.code, wanted)).map(explanation).collect();
    match wanted {
        Some(text) if codes.is_empty() => Err(Error::new(Exit::Usage, format!("there is no code `{text}`"))
            .hint("`mercury explain` lists them all")),
        _ => Ok(Explanations { codes }),
    }
}

fn matches(code: Code, wanted: Option<&str>) -> bool {
    let is = |text: &str| text.eq_ignore_ascii_case(code.name()) || text.parse() == Ok(code as u32);
    wanted.is_none_or(is)
}

fn explanation(entry: &Entry) -> Explanation {
    Explanation {
        code: entry.code.name(),
        number: entry.code as u32,
        exit: Exit::of(entry.code) as u8,
        meaning: entry.meaning,
        why: entry.why,
        remedy: entry.remedy,
    }
}

impl Render for Explanations {
    fn render(&self, to: &mut crate::output::Text) {
        match self.codes.as_slice() {
            [one] => {
                let name = to.tone(Tone::Strong, one.code);
                to.line(format!("{name} ({}): {}.", one.number, one.meaning));
                to.line("");
                to.wrapped("Why:  ", one.why);
                to.wrapped("To do: ", one.remedy);
            }
            all => {
                for one in all {
                    let name = to.tone(Tone::Strong, &format!("{:26}", one.code));
                    to.after(&format!("{:>4}  {name}", one.number), one.meaning);
                }
            }
        }
    }
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

    #[test]
    fn found_by_name_and_number() {
        for wanted in ["svm-disabled", "SVM-Disabled", "43"] {
            let found = explain(Some(wanted)).expect(wanted);
            assert_eq!(found.codes.iter().map(|one| one.number).collect::<Vec<_>>(), [43]);
        }
        assert_eq!(explain(None).map(|all| all.codes.len()).ok(), Some(Code::ALL.len()));
        assert_eq!(explain(Some("nonsense")).map_err(|error| error.exit).err(), Some(Exit::Usage));
    }
}
