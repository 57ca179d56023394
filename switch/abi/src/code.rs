//! Stable codes: each refusal, and each way in which a CPU left the hypervisor, has a number for
//! programs and a short name for people (`mercury explain NAME`). A number is never used for
//! another meaning.

/// First number of codes that neither the driver nor the hypervisor has.
pub const USER_SPACE_CODES: u32 = 200;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal;)*) => {
        /// The reason of a refusal or of a departure; 0 is success.
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Code { $($(#[$doc])* $name = $number,)* }

        impl Code {
            /// Every code, in numerical order.
            pub const ALL: &'static [Code] = &[$(Code::$name,)*];

            /// Returns the code's short name, as `mercury explain` takes it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Code::$name => $text,)* }
            }

            /// Returns the code with this number, if there is one.
            #[must_use]
            pub const fn from_number(number: u32) -> Option<Code> {
                match number { $($number => Some(Code::$name),)* _ => None }
            }
        }
    };
}

codes! {
    /// The operation succeeded.
    Ok = 0, "ok";

    // 1..: the request itself
    /// The caller was built against another version of this interface.
    AbiMismatch = 1, "abi-mismatch";
    /// An argument has no meaning: unknown flag, reserved field set, or number out of range.
    BadArgument = 2, "bad-argument";
    /// The hypervisor is not loaded.
    NotLoaded = 3, "not-loaded";
    /// The hypervisor is loaded already.
    AlreadyLoaded = 4, "already-loaded";
    /// The request needs all CPUs native, and some are attached.
    StillAttached = 5, "still-attached";
    /// Another process controls Mercury.
    Busy = 6, "busy";
    /// A named CPU does not exist or is offline.
    CpuOffline = 7, "cpu-offline";
    /// The machine is going down or has panicked.
    GoingDown = 8, "going-down";
    /// The hypervisor image embedded in the driver is damaged or from another build.
    BadImage = 9, "bad-image";
    /// The number is no hypercall and no native operation.
    UnknownOperation = 10, "unknown-operation";
    /// A crashed hypervisor must be unloaded and loaded again before the next attach.
    Crashed = 11, "crashed";
    /// A hypervisor runs below some CPUs, and its driver is gone.
    OrphanedHypervisor = 12, "orphaned-hypervisor";
    /// The kernel is locked down, and keeps root from what the request does to memory.
    LockedDown = 13, "locked-down";

    // 20..: memory
    /// The kernel has too little physically contiguous memory.
    NoContiguousMemory = 20, "no-contiguous-memory";
    /// The kernel has too little memory.
    NoMemory = 21, "no-memory";
    /// The nested tables need more pages than the driver donated (internal: the driver donates and
    /// retries).
    NeedPages = 22, "need-pages";
    /// The construction is not finished (internal: the driver calls again).
    More = 23, "more";

    // 40..: the processor cannot
    /// The processor is neither AMD's nor Intel's.
    VendorUnsupported = 40, "vendor-unsupported";
    /// The processor is AMD's and older than family 17h.
    FamilyUnsupported = 41, "family-unsupported";
    /// CPUID reports no SVM.
    NoSvm = 42, "no-svm";
    /// SVM is disabled by firmware (VM_CR.SVMDIS).
    SvmDisabled = 43, "svm-disabled";
    /// The processor has no nested paging.
    NoNestedPaging = 44, "no-nested-paging";
    /// The processor has fewer than two address-space identifiers.
    NoAsids = 45, "no-asids";
    /// VM_CR.R_INIT redirects INIT.
    InitRedirected = 46, "init-redirected";
    /// Hardware virtualization is in use already (EFER.SVME or CR4.VMXE is set).
    VirtualizationInUse = 47, "virtualization-in-use";
    /// The processor is Intel's, which this version does not support.
    IntelUnsupported = 48, "intel-unsupported";
    /// CR0 holds a bit or a combination that Mercury does not know or cannot carry over.
    Cr0Unsupported = 50, "cr0-unsupported";
    /// CR4 holds an unknown or unsupported bit.
    Cr4Unsupported = 51, "cr4-unsupported";
    /// EFER holds an unknown or unsupported bit.
    EferUnsupported = 52, "efer-unsupported";
    /// CR3 holds an unknown or unsupported bit.
    Cr3Unsupported = 53, "cr3-unsupported";
    /// XCR0 or XSS holds an unknown component.
    XstateUnsupported = 54, "xstate-unsupported";
    /// Supervisor CET (S_CET) is in use.
    SupervisorCet = 55, "supervisor-cet";
    /// Memory encryption (SME) is active.
    MemoryEncryption = 56, "memory-encryption";
    /// SEV-SNP is enabled on this host.
    SnpEnabled = 57, "snp-enabled";
    /// PAT entry 0 is not write-back.
    PatUnsupported = 58, "pat-unsupported";
    /// The TSC ratio MSR is not 1.0.
    TscRatio = 59, "tsc-ratio";
    /// The kernel broadcasts TLB invalidations with INVLPGB.
    InvlpgbInUse = 60, "invlpgb-in-use";
    /// A machine check is in progress.
    MachineCheckInProgress = 61, "machine-check-in-progress";
    /// The kernel isolates page tables (PTI).
    PageTableIsolation = 62, "page-table-isolation";
    /// RFLAGS.TF is set: a debugger single-steps the switch.
    SingleStep = 63, "single-step";
    /// Physical memory reaches beyond the nested map.
    MemoryBeyondMap = 64, "memory-beyond-map";
    /// This CPU differs from CPU 0 in something that the hypervisor relies on.
    CpusDiffer = 65, "cpus-differ";
    /// The kernel is of a series that was never tested.
    KernelUntested = 66, "kernel-untested";
    /// Kernel lockdown or module signing keeps the driver out.
    Lockdown = 67, "lockdown";
    /// FRED event delivery is on.
    Fred = 68, "fred";
    /// Xen or another privileged layer is beneath this kernel.
    PrivilegedLayer = 69, "privileged-layer";
    /// This machine is itself a virtual machine (a warning).
    InsideHypervisor = 70, "inside-hypervisor";
    /// The descriptor of a segment register cannot be read back.
    SegmentUnreadable = 71, "segment-unreadable";
    /// A preflight value was not readable on this CPU.
    FactUnreadable = 72, "fact-unreadable";
    /// The state of the CPU changed between preflight and switch.
    StateChanged = 73, "state-changed";
    /// MTRRs are disabled or differ between CPUs (a warning).
    MtrrInconsistent = 74, "mtrr-inconsistent";
    /// Branch recording, single-step on branches or armed breakpoints are active (a note).
    DebugActive = 75, "debug-active";
    /// VM_HSAVE_PA is not zero: other software used SVM before (a warning).
    HsaveInUse = 76, "hsave-in-use";
    /// The hypervisor's self-test on the first CPU failed.
    SelfTestFailed = 77, "self-test-failed";
    /// The kernel relies on the processor to protect return predictions (ERAPS).
    ErapsInUse = 78, "eraps-in-use";

    /// CPUID reports no VMX.
    NoVmx = 80, "no-vmx";
    /// VMX is disabled by firmware (IA32_FEATURE_CONTROL).
    VmxDisabled = 81, "vmx-disabled";
    /// The processor has no extended page tables.
    NoEpt = 82, "no-ept";
    /// The processor lacks the unrestricted-guest control.
    NoUnrestrictedGuest = 83, "no-unrestricted-guest";
    /// The extended page tables lack write-back memory, four levels, 2 MiB pages or INVEPT.
    EptUnsupported = 84, "ept-unsupported";
    /// VMX demands a control that Mercury does not know.
    VmxControlForced = 85, "vmx-control-forced";
    /// VMX lacks a control that Mercury needs.
    VmxControlMissing = 86, "vmx-control-missing";
    /// An instruction that CPUID announces would be undefined under VMX: its control is missing.
    VmxInstructionLost = 87, "vmx-instruction-lost";
    /// CR0 or CR4 has a bit that VMX does not allow.
    VmxFixedBits = 88, "vmx-fixed-bits";
    /// Processor trace is running, and VMX would stop it.
    ProcessorTrace = 89, "processor-trace";
    /// VMX wants its regions elsewhere than in Mercury's memory: not write-back, or below 4 GiB.
    VmxRegion = 90, "vmx-region";
    /// The processor stores records of samples or branches at virtual addresses (PEBS, BTS).
    DebugStore = 91, "debug-store";

    // 100..: the switch
    /// The processor refused the control block (VMRUN, VMLAUNCH). The detail names the illegal
    /// state.
    InvalidGuestState = 100, "invalid-guest-state";
    /// An injected fault (only in fault-injection builds).
    InjectedFault = 101, "injected-fault";
    /// The hypervisor faulted while it switched; the CPU was rolled back.
    FaultInSwitch = 102, "fault-in-switch";
    /// The CPU reported after the switch that it is in the wrong mode.
    WrongMode = 103, "wrong-mode";

    // 120..: why a CPU left the hypervisor other than by detach
    /// An exception in the hypervisor's own code.
    HostException = 120, "host-exception";
    /// A panic in the hypervisor's own code.
    HostPanic = 121, "host-panic";
    /// The hypervisor does not know an exit.
    UnknownExit = 122, "unknown-exit";
    /// The kernel cleared EFER.SVME or VM_HSAVE_PA.
    SvmReleased = 123, "svm-released";
    /// The kernel loaded microcode.
    MicrocodeUpdate = 124, "microcode-update";
    /// The CPU was reset (INIT) while it was attached.
    CpuReset = 125, "cpu-reset";
    /// The nested tables could not be extended.
    NestedMapExhausted = 126, "nested-map-exhausted";
    /// The kernel executed VMXOFF, or cleared CR4.VMXE.
    VmxReleased = 127, "vmx-released";
    /// The kernel changed an MTRR. The nested tables repeat the MTRRs' memory types.
    MtrrChanged = 128, "mtrr-changed";
    /// KVM ran a guest that cannot run above Mercury: encrypted (SEV), with AVIC, or with the only
    /// identifier there is.
    GuestUnsupported = 129, "guest-unsupported";

    // 140..: snapshots
    /// The request cannot be met while there is a snapshot.
    SnapshotLive = 140, "snapshot-live";
    /// There is no snapshot.
    NoSnapshot = 141, "no-snapshot";
    /// A CPU did not reach the instant in time.
    SnapshotMissed = 142, "snapshot-missed";
    /// The pool had no page for a copy.
    SnapshotPool = 143, "snapshot-pool";
    /// A CPU left the hypervisor, so that its writes were not seen.
    SnapshotLost = 144, "snapshot-lost";
    /// The driver cannot see which memory devices may write.
    SnapshotDevices = 145, "snapshot-devices";
    /// The kernel could not stop its tasks and devices for the instant.
    SnapshotQuiesce = 146, "snapshot-quiesce";
    /// A CPU came or went, and the snapshot could not be kept.
    SnapshotHotplug = 147, "snapshot-hotplug";
    /// This kernel has no hooks for packets, so the network cannot be fenced off.
    FenceUnsupported = 148, "fence-unsupported";
    /// A virtual machine ran on a CPU, and wrote past the tables of the snapshot.
    SnapshotGuest = 149, "snapshot-guest";
    /// Memory was swapped out to a disk at the instant.
    SnapshotSwap = 153, "snapshot-swap";

    // 150..: putting the machine back to a snapshot
    /// This processor lacks a control by which a rollback fetches CPUs.
    RollbackUnsupported = 150, "rollback-unsupported";
    /// A CPU did not come to the rollback.
    RollbackMissed = 151, "rollback-missed";
    /// The hypervisor could not silence some devices.
    RollbackDevices = 152, "rollback-devices";
    /// A network device encrypts with MACsec, whose packet numbers must not be used twice.
    MacsecInUse = 154, "macsec-in-use";

    /// The machine died of the same three times in ten minutes.
    RollbackRepeated = 170, "rollback-repeated";
    /// The life before the last rollback is not known any more.
    NoPostMortem = 159, "no-post-mortem";

    // 155..: dirty logs
    /// There is no dirty log of memory on this processor, or beneath this kernel.
    LogUnsupported = 155, "log-unsupported";
    /// There is no dirty log for this disk, or beneath this kernel.
    DiskUnsupported = 156, "disk-unsupported";
    /// The disk has a dirty log already, or too many disks have one.
    DiskLogged = 157, "disk-logged";
    /// The disk has no dirty log.
    NoDiskLog = 158, "no-disk-log";

    // 160..: bringing a machine back
    /// The CPUs of the image are not those of this machine.
    RestoreCpus = 160, "restore-cpus";
    /// The paging depth or the mode of the local APICs differs from the image's.
    RestoreMode = 161, "restore-mode";
    /// This kernel occupies memory that the image needs, and that cannot be moved out of its way.
    RestoreOverlap = 162, "restore-overlap";
    /// Too little memory is free beside the image.
    RestoreRoom = 163, "restore-room";
    /// Frames of the image are missing.
    RestoreIncomplete = 164, "restore-incomplete";
    /// A frame is not part of the image.
    RestoreFrame = 165, "restore-frame";
    /// The kernel could not stop its devices.
    RestoreQuiesce = 166, "restore-quiesce";
    /// The restore environment does not find memory of the checkpointed machine.
    RestoreMemory = 167, "restore-memory";

    // 171..: the watch of `mercury guard`
    /// There is no HPET with a free comparator.
    WatchNoHpet = 171, "watch-no-hpet";
    /// Another program uses the comparator of the HPET.
    WatchHpetBusy = 172, "watch-hpet-busy";
    /// An IOMMU remaps interrupts.
    WatchRemapped = 173, "watch-remapped";
    /// The I/O APIC has no free pin that the HPET can use.
    WatchNoPin = 174, "watch-no-pin";
    /// NMIs of the HPET do not arrive.
    WatchSilent = 175, "watch-silent";
    /// The processor has no free counter of cycles.
    WatchNoPmu = 176, "watch-no-pmu";

    // 177..: the integrity of the kernel's code
    /// The kernel does not map the memory read-only, so it is neither code nor a constant.
    MendNotReadOnly = 177, "mend-not-read-only";
    /// The memory holds other bytes by now.
    MendChanged = 178, "mend-changed";
    /// The kernel's memory cannot be read.
    IntegrityUnreadable = 179, "integrity-unreadable";

    // 180..: refusals of the command alone, before an image, a kept snapshot or a move
    /// Memory is swapped out.
    SwapInUse = 180, "swap-in-use";
    /// A device that is in use writes to memory where the driver cannot see it.
    DevicesUnseen = 181, "devices-unseen";
    /// CPUs are offline.
    CpusOffline = 182, "cpus-offline";
    /// A watchdog cannot be fed while its program is frozen.
    WatchdogUnfed = 183, "watchdog-unfed";
    /// A network card is a member of a bond or a team.
    CardsBundled = 184, "cards-bundled";
    /// Local disks can be written to, and a rollback puts back memory only.
    DisksStayBehind = 185, "disks-stay-behind";
    /// A file system is mounted over an NFS version whose sessions cannot go back.
    NfsSessions = 186, "nfs-sessions";
    /// The restore environment could not tell if a file system is unchanged.
    DisksUncomparable = 187, "disks-uncomparable";
    /// There is no place for the tombstone of a move.
    NoPlaceForTombstone = 188, "no-place-for-tombstone";
    /// A disk or a file system is in use where it cannot be held still.
    DisksUnheld = 189, "disks-unheld";
    /// The driver is not installed for the running kernel.
    DriverMissing = 190, "driver-missing";
    /// There is no modprobe command.
    NoModprobe = 191, "no-modprobe";
    /// The driver was built for another kernel.
    DriverForeign = 192, "driver-foreign";
    /// A restart forgets memory until a driver has set it up.
    MemoryForgotten = 193, "memory-forgotten";

    // 194..: events and refusals of the guard in mercuryd
    /// The file with the guard's rules has a mistake.
    BadRules = 194, "bad-rules";
    /// A sensor of the hardware has passed its limit.
    SensorAlarm = 195, "sensor-alarm";
    /// A sensor of the hardware does not answer.
    SensorSilent = 196, "sensor-silent";
    /// A service has failed, or gives no heartbeat.
    ServiceSilent = 197, "service-silent";
    /// There is no machine to move to.
    NoDestination = 198, "no-destination";
    /// Rollbacks for services have not helped.
    RollbackInVain = 199, "rollback-in-vain";

    // 200..: reasons for which a machine cannot be a guest. Only user space has them.
    /// The processor's vendor or family is another one.
    GuestProcessor = 200, "guest-processor";
    /// The kernel uses features of the processor that KVM does not offer.
    GuestFeatures = 201, "guest-features";
    /// KVM has no room for the number of processors, or for their identifiers.
    GuestCpus = 202, "guest-cpus";
    /// A device keeps the machine from being a guest.
    GuestDevices = 203, "guest-devices";
    /// The machine uses an IOMMU.
    GuestIommu = 204, "guest-iommu";
    /// A file system or a swap area is on a disk that does not come along.
    GuestDisks = 205, "guest-disks";
    /// The host has too little memory available.
    GuestMemory = 206, "guest-memory";
    /// KVM cannot let the timers count at their rate.
    GuestTimers = 207, "guest-timers";
    /// The firmware is not a PC's, or its memory is not in the image.
    GuestFirmware = 208, "guest-firmware";
    /// The image is incremental.
    GuestIncremental = 209, "guest-incremental";
    /// The image's description is not of a machine that can exist.
    GuestDescription = 210, "guest-description";
    /// The kernel has no drivers of a guest's devices.
    GuestDrivers = 211, "guest-drivers";

    // 212..: refusals of the command alone, before an image
    /// A restore environment on the same hardware would refuse the image.
    RestoreUnfit = 212, "restore-unfit";
}
