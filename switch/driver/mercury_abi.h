/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The interface between hypervisor, driver and command.
 *
 * Generated from the crate mercury-abi (switch/abi/src). Do not edit:
 *	cargo run -p mercury-abi-header
 */
#ifndef MERCURY_ABI_H
#define MERCURY_ABI_H

#include <linux/const.h>

/*
 * Version of every layout and meaning in this crate. Each change of one of them raises
 * the version.
 */
#define MERCURY_ABI_VERSION 13
/* VM_CR (C001_0114h): SVM enabled, locked, INIT redirected (AMD). */
#define MERCURY_READABLE_VM_CR 1
/* VM_HSAVE_PA (C001_0117h): host-physical address of the host save area (AMD). */
#define MERCURY_READABLE_VM_HSAVE_PA 2
/* SYSCFG (C001_0010h): memory encryption and MTRR options (AMD). */
#define MERCURY_READABLE_SYSCFG 4
/* SPEC_CTRL (48h): speculation controls. */
#define MERCURY_READABLE_SPEC_CTRL 8
/* TSC_RATIO (C000_0104h): scale of a guest's TSC (AMD). */
#define MERCURY_READABLE_TSC_RATIO 16
/* DEBUGCTL (1D9h): recording of branches. */
#define MERCURY_READABLE_DEBUGCTL 32
/* S_CET (6A2h): control-flow enforcement of the supervisor. */
#define MERCURY_READABLE_S_CET 64
/* ISST_ADDR (6A8h): table of interrupt shadow stacks. */
#define MERCURY_READABLE_ISST_ADDR 128
/* XSS (DA0h): supervisor components of the extended state. */
#define MERCURY_READABLE_XSS 256
/* MCG_STATUS (17Ah): state of a machine check. */
#define MERCURY_READABLE_MCG_STATUS 512
/* PAT (277h): page attribute table. */
#define MERCURY_READABLE_PAT 1024
/* MTRRdefType (2FFh) and all other MTRRs, which the digest covers. */
#define MERCURY_READABLE_MTRR 2048
/* TSC_AUX (C000_0103h): the value that RDTSCP returns in ECX. */
#define MERCURY_READABLE_TSC_AUX 4096
/* MCA_CTL of SMCA bank 0 (C000_2000h): scalable machine checks (AMD). */
#define MERCURY_READABLE_SMCA 8192
/* HWCR (C001_0015h): hardware configuration (AMD). */
#define MERCURY_READABLE_HWCR 16384
/* Revision of the microcode (8Bh). */
#define MERCURY_READABLE_MICROCODE 32768
/* IA32_FEATURE_CONTROL (3Ah): VMX enabled and locked (Intel). */
#define MERCURY_READABLE_FEATURE_CONTROL 0x10000
/*
 * The capability MSRs of VMX (480h to 492h), as far as CPUID and IA32_VMX_BASIC
 * announce them (Intel).
 */
#define MERCURY_READABLE_VMX 0x20000
/* IA32_RTIT_CTL (570h): processor trace (Intel). */
#define MERCURY_READABLE_RTIT_CTL 0x40000
/* IA32_PEBS_ENABLE (3F1h): event-based sampling (Intel). */
#define MERCURY_READABLE_PEBS_ENABLE 0x80000
/* Page-table isolation is on (X86_FEATURE_PTI). */
#define MERCURY_SYSTEM_PTI 1
/* The kernel runs with memory encryption (sme_me_mask is not zero). */
#define MERCURY_SYSTEM_SME 2
/* The kernel runs as a Xen guest. */
#define MERCURY_SYSTEM_PRIVILEGED_LAYER 4
/* The kernel uses INVLPGB for TLB shootdowns. */
#define MERCURY_SYSTEM_INVLPGB 8
/* The kernel relies on the return predictor's own protection (ERAPS). */
#define MERCURY_SYSTEM_ERAPS 16
/* KVM is loaded, and may keep its hold on the hardware while CPUs are attached (AMD). */
#define MERCURY_SYSTEM_KVM_MAY 32
/*
 * The kernel was started without mitigations of its processor's vulnerabilities
 * (mitigations=off).
 */
#define MERCURY_SYSTEM_MITIGATIONS_OFF 64
/* Size of one CPU's block in bytes: two pages. */
#define MERCURY_SHARED_CPU_SIZE 8192
/* "MERCURY1" in ASCII, little-endian: the first word of a block. */
#define MERCURY_SHARED_MAGIC _UL(0x315952554352454d)
/*
 * Bit of an exit code that marks VMX's exit reason in bits 31:0 (SDM volume 3, appendix
 * C). SVM's exit codes have the bit clear or are negative (APM volume 2, appendix C).
 */
#define MERCURY_EXIT_CODE_VMX _UL(0x100000000)
/* Number of exit counters: room for more than the ExitReasons of today. */
#define MERCURY_EXIT_REASONS 24
/* Number of records in one CPU's log ring. */
#define MERCURY_LOG_RECORDS 64
/* SharedCpu::read_only: no page is read-only for integrity. */
#define MERCURY_READ_ONLY_NONE 0
/*
 * SharedCpu::read_only: the CPU runs on the tables of a snapshot or of a dirty log, and
 * no page is read-only for integrity until they end.
 */
#define MERCURY_READ_ONLY_LATER 1

/* The reason of an exit: index into SharedCpu::exits. */
#define MERCURY_EXIT_REASON_HYPERCALL 0
#define MERCURY_EXIT_REASON_FOREIGN_HYPERCALL 1
#define MERCURY_EXIT_REASON_MSR_EFER 2
#define MERCURY_EXIT_REASON_MSR_HSAVE 3
#define MERCURY_EXIT_REASON_MSR_PAT 4
#define MERCURY_EXIT_REASON_MSR_MICROCODE 5
#define MERCURY_EXIT_REASON_MSR_PASS_THROUGH 6
#define MERCURY_EXIT_REASON_VIRT_INSTRUCTION 7
#define MERCURY_EXIT_REASON_NESTED_FILL 8
#define MERCURY_EXIT_REASON_HIDDEN_WRITE 9
#define MERCURY_EXIT_REASON_CPUID 10
#define MERCURY_EXIT_REASON_XSETBV 11
#define MERCURY_EXIT_REASON_OTHER 12
#define MERCURY_EXIT_REASON_UNKNOWN 13
#define MERCURY_EXIT_REASON_SNAPSHOT_WRITE 14
#define MERCURY_EXIT_REASON_GUEST_RUN 15
#define MERCURY_EXIT_REASON_GUEST_END 16
#define MERCURY_EXIT_REASON_HELD_NMI 17
#define MERCURY_EXIT_REASON_TEXT_POKE 18
#define MERCURY_EXIT_REASON_FOREIGN_STORE 19


/* The event that a LogRecord reports. */
#define MERCURY_LOG_KIND_NONE 0
#define MERCURY_LOG_KIND_ATTACHED 1
#define MERCURY_LOG_KIND_DETACHED 2
#define MERCURY_LOG_KIND_LEFT 3
#define MERCURY_LOG_KIND_MSR 4
#define MERCURY_LOG_KIND_NESTED_FILL 5
#define MERCURY_LOG_KIND_HIDDEN_WRITE 6
#define MERCURY_LOG_KIND_REINJECTED 7
#define MERCURY_LOG_KIND_CRASH 8
#define MERCURY_LOG_KIND_INVALID_STATE 9
#define MERCURY_LOG_KIND_EVENT_LOST 10
#define MERCURY_LOG_KIND_ROLLED_BACK 11
#define MERCURY_LOG_KIND_FOREIGN_STORE 12

/*
 * Pages of one CPU's area. They are physically and virtually contiguous, and aligned to
 * the area's size.
 */
#define MERCURY_AREA_PAGES 8
/* Size of one CPU's area in bytes. */
#define MERCURY_AREA_SIZE 32768
/*
 * Index of the page that holds the vendor's control block (VMCB: APM volume 2, appendix
 * B; VMCS: SDM volume 3, "Virtual-Machine Control Structures").
 */
#define MERCURY_AREA_PAGE_CONTROL 1
/*
 * Index of the page that holds the hypervisor's own extended state: a VMCB for VMLOAD
 * (AMD).
 */
#define MERCURY_AREA_PAGE_HOST 2
/*
 * Index of the page that only the processor uses: the host save area (VM_HSAVE_PA, AMD)
 * or the VMXON region (Intel). The hypervisor's tables do not map the page, so that an
 * overflow of the stack faults there.
 */
#define MERCURY_AREA_PAGE_PROCESSOR 4
/* Index of the stack's first page. The stack ends at the end of the area. */
#define MERCURY_AREA_PAGE_STACK 5

/*
 * A vendor of hardware virtualization. The driver chooses the hypervisor's entry point
 * by the vendor; no other path of a switch depends on it.
 */
#define MERCURY_VENDOR_AMD 0
#define MERCURY_VENDOR_INTEL 1

/* Number of Vendors: entries of arrays by vendor. */
#define MERCURY_VENDORS 2
/* "MERCHYPR" in ASCII, little-endian: the first word of the hypervisor's flat image. */
#define MERCURY_IMAGE_MAGIC _UL(0x525059484352454d)
/* Bit of Outward::svm: EFER.SVME stays set, because KVM has set it. */
#define MERCURY_KEEP_SVME 1
/* Bit of Outward::svm: GIF stays 0, because KVM has cleared it. */
#define MERCURY_KEEP_GIF_CLEAR 2
/* Offset in bytes of the hypervisor's private data in the gate page. */
#define MERCURY_GATE_PRIVATE_OFFSET 1024

/* Operations that the hypervisor executes on a native CPU, through the gate. */
#define MERCURY_NATIVE_OP_INIT 1
#define MERCURY_NATIVE_OP_BUILD 2
#define MERCURY_NATIVE_OP_PREFLIGHT 3
#define MERCURY_NATIVE_OP_ATTACH 4

/* "MERC" in ASCII: RCX of every hypercall. */
#define MERCURY_HYPERCALL_MAGIC 0x4352454d
/*
 * Bit that RDMSR of EFER sets in its answer on an attached AMD CPU if RSI holds
 * HYPERCALL_MAGIC. With it the driver asks a CPU for its mode without an exception: bit
 * 63 is never set in the processor's own EFER.
 */
#define MERCURY_EFER_ATTACHED _UL(0x8000000000000000)

/*
 * Hypercalls of the driver. In: the number in RAX, HYPERCALL_MAGIC in RCX, arguments in
 * RDI and RSI. Out: the result code in RAX, a value in RDX. Other registers are
 * preserved. The instruction is #UD from user mode, with another RCX, or on a native
 * CPU.
 */
#define MERCURY_HYPERCALL_PING 0
#define MERCURY_HYPERCALL_DETACH 1
#define MERCURY_HYPERCALL_FLUSH 2
#define MERCURY_HYPERCALL_ARM_FAULT 3
#define MERCURY_HYPERCALL_SNAPSHOT 4
#define MERCURY_HYPERCALL_INTEGRITY 5

/* Position of an IntegrityCall in RDI. */
#define MERCURY_INTEGRITY_SHIFT 56
/* Most ranges of code that IntegrityCall::Writer adds. */
#define MERCURY_INTEGRITY_WRITERS 4

/*
 * A request about pages of the system that are read-only in the nested tables. A store
 * to one of them is logged (crate::shared::LogKind::ForeignStore), and the page can be
 * written from then on.
 */
#define MERCURY_INTEGRITY_CALL_BEGIN 0
#define MERCURY_INTEGRITY_CALL_WRITER 1
#define MERCURY_INTEGRITY_CALL_PROTECT 2
#define MERCURY_INTEGRITY_CALL_ENTER 3
#define MERCURY_INTEGRITY_CALL_LEAVE 4


/*
 * A place where a test can inject a fault (fault-injection builds only). A point fires
 * once per arming.
 */
#define MERCURY_FAULT_POINT_NONE 0
#define MERCURY_FAULT_POINT_LOAD_CONTIGUOUS 1
#define MERCURY_FAULT_POINT_LOAD_MEMORY 2
#define MERCURY_FAULT_POINT_LOAD_IMAGE 3
#define MERCURY_FAULT_POINT_FACTS 4
#define MERCURY_FAULT_POINT_BEFORE_SVME 5
#define MERCURY_FAULT_POINT_AFTER_SVME 6
#define MERCURY_FAULT_POINT_AFTER_SWITCH 7
#define MERCURY_FAULT_POINT_HOTPLUG 8
#define MERCURY_FAULT_POINT_EXIT 9
#define MERCURY_FAULT_POINT_ENTRY 32
#define MERCURY_FAULT_POINT_AFTER_SAVE 33
#define MERCURY_FAULT_POINT_AFTER_CAPTURE 34
#define MERCURY_FAULT_POINT_BEFORE_RUN 35
#define MERCURY_FAULT_POINT_ENTRY_PAGE_FAULT 36
#define MERCURY_FAULT_POINT_ENTRY_PANIC 37
#define MERCURY_FAULT_POINT_RUN_ASID_ZERO 38
#define MERCURY_FAULT_POINT_RUN_NO_INTERCEPT 39
#define MERCURY_FAULT_POINT_RUN_CR0 40
#define MERCURY_FAULT_POINT_RUN_CR4 41
#define MERCURY_FAULT_POINT_RUN_EFER 42
#define MERCURY_FAULT_POINT_RUN_CR3 43
#define MERCURY_FAULT_POINT_RUN_DR7 44
#define MERCURY_FAULT_POINT_RUN_FIELD 45
#define MERCURY_FAULT_POINT_EXIT_PAGE_FAULT 64
#define MERCURY_FAULT_POINT_EXIT_GENERAL_PROTECTION 65
#define MERCURY_FAULT_POINT_EXIT_INVALID_OPCODE 66
#define MERCURY_FAULT_POINT_EXIT_STACK_OVERFLOW 67
#define MERCURY_FAULT_POINT_EXIT_PANIC 68
#define MERCURY_FAULT_POINT_EXIT_UNKNOWN 69
#define MERCURY_FAULT_POINT_EXIT_CORRUPT_CONTROL 70
#define MERCURY_FAULT_POINT_EXIT_CORRUPT_STATE 71
#define MERCURY_FAULT_POINT_DETACH_PAGE_FAULT 72
#define MERCURY_FAULT_POINT_DETACH_PANIC 73
#define MERCURY_FAULT_POINT_EXIT_EVENT 74
#define MERCURY_FAULT_POINT_QUICK_PAGE_FAULT 75


/* A request of the driver about a snapshot or a dirty log. */
#define MERCURY_SNAPSHOT_CALL_DONATE 0
#define MERCURY_SNAPSHOT_CALL_BEGIN 1
#define MERCURY_SNAPSHOT_CALL_ENTER 2
#define MERCURY_SNAPSHOT_CALL_READ 3
#define MERCURY_SNAPSHOT_CALL_LEAVE 4
#define MERCURY_SNAPSHOT_CALL_END 5
#define MERCURY_SNAPSHOT_CALL_STATUS 6
#define MERCURY_SNAPSHOT_CALL_TABLES 7
#define MERCURY_SNAPSHOT_CALL_ROLLBACK 8
#define MERCURY_SNAPSHOT_CALL_GIVE_UP 9
#define MERCURY_SNAPSHOT_CALL_HOLD 10
#define MERCURY_SNAPSHOT_CALL_RECLAIM 11
#define MERCURY_SNAPSHOT_CALL_LOG_BEGIN 12
#define MERCURY_SNAPSHOT_CALL_LOG_ENTER 13
#define MERCURY_SNAPSHOT_CALL_LOG_COLLECT 14
#define MERCURY_SNAPSHOT_CALL_READ_DEAD 15
#define MERCURY_SNAPSHOT_CALL_DROP_DEAD 16

/* Value of RAX with which each CPU goes on in a machine that was put back. */
#define MERCURY_ROLLED_BACK 2

/* The reason of a rollback. */
#define MERCURY_ROLLBACK_REASON_NONE 0
#define MERCURY_ROLLBACK_REASON_COMMAND 1
#define MERCURY_ROLLBACK_REASON_PANIC 2
#define MERCURY_ROLLBACK_REASON_STOP 3
#define MERCURY_ROLLBACK_REASON_TRIPLE_FAULT 4
#define MERCURY_ROLLBACK_REASON_HANG 5
#define MERCURY_ROLLBACK_REASON_OOPS 6

/* Number of entries of a PageList. */
#define MERCURY_PAGE_LIST_MAX 511
/* Number of bits in one bitmap of pages: one bit per page of 4 GiB. */
#define MERCURY_MAP_BITS 0x100000
/* Number of entries of a ReadList. So many pages are copied with interrupts off. */
#define MERCURY_READ_LIST_MAX 16
/*
 * Largest Landing::cpus: the array at Landing::cpus_phys lies in the page of the
 * Landing.
 */
#define MERCURY_LANDING_CPUS_MAX 506
/* Number of entries of a LandingList. */
#define MERCURY_LANDING_LIST_MAX 255
/* Value of RestartRange::kind: memory that the image holds. */
#define MERCURY_RANGE_KEPT 0
/* Value of RestartRange::kind: memory of the machine that the image leaves out. */
#define MERCURY_RANGE_FREE 1
/* Flag: the kernel of the image uses five-level paging. */
#define MERCURY_RESTART_FIVE_LEVEL 1
/* Flag: the local APICs are in x2APIC mode (SDM volume 3, "Extended xAPIC"). */
#define MERCURY_RESTART_X2APIC 2
/*
 * Flag of the transfer, not of the machine: a frame may be loaded more than once. The
 * last load determines its content.
 */
#define MERCURY_RESTART_AGAIN 256
/* Value of LoadEntry::source: the content is the next page of the data. */
#define MERCURY_LOAD_DATA 1
/* Value of LoadEntry::source: the content is all zeros. */
#define MERCURY_LOAD_ZERO 2
/*
 * CPUID leaf with the signature of Mercury's monitor: MERCURY_GUEST_SIGNATURE_* in EBX,
 * ECX and EDX. EAX is the highest leaf of the group.
 */
#define MERCURY_GUEST_LEAF 0x40004d00
/*
 * CPUID leaf with the physical address of the GuestDescription: the low half in EAX,
 * the high half in EBX. ECX has the first of MERCURY_GUEST_PORTS ports by which the
 * monitor answers calls, or 0.
 */
#define MERCURY_GUEST_LEAF_DESCRIPTION 0x40004d01
/* EBX of MERCURY_GUEST_LEAF, the first third of the text "MercuryGuest". */
#define MERCURY_GUEST_SIGNATURE_EBX 0x6372654d
/* ECX of MERCURY_GUEST_LEAF. */
#define MERCURY_GUEST_SIGNATURE_ECX 0x47797275
/* EDX of MERCURY_GUEST_LEAF. */
#define MERCURY_GUEST_SIGNATURE_EDX 0x74736575
/*
 * Number of the ports for calls. The monitor stands in for the hypervisor when the
 * guest moves away. Writing the page number of an argument to the first port plus the
 * number of a crate::snapshot::SnapshotCall, 32 bits at once, makes the call. Reading
 * 32 bits of the first port tells its crate::code::Code. Both are done on one CPU with
 * interrupts off. Virtual addresses in arguments are those of that CPU. A snapshot can
 * neither be kept nor hashed, and no dirty log follows it.
 */
#define MERCURY_GUEST_PORTS 32
/*
 * Number of the port, from the first one on, that takes the command's words for the
 * host's operator, byte by byte. 32 bits at once are the error for which the kernel
 * could not start the command.
 */
#define MERCURY_GUEST_ANSWER 31
/*
 * A byte read from port MERCURY_GUEST_ANSWER: the host's operator lets a guest go on
 * that stands still in doubt about its move. Each word is read once. Other bytes mean
 * nothing.
 */
#define MERCURY_GUEST_RESUME 1
/* A byte read there: the operator says that the guest runs at its destination. */
#define MERCURY_GUEST_ABANDON 2
/*
 * Place of the host's order in the page of the GuestDescription: strings that end with
 * a NUL each. The first is a variable of the environment, and the others are words for
 * the command mercury. An empty string ends them.
 */
#define MERCURY_GUEST_ORDER 1024
/* Largest size of an order in bytes. */
#define MERCURY_GUEST_ORDER_MAX 3072
/* First field of a GuestDescription: the text "MRCGUEST". */
#define MERCURY_GUEST_MAGIC _UL(0x545345554743524d)
/* Version of the GuestDescription. The driver leaves another version's devices alone. */
#define MERCURY_GUEST_VERSION 1
/* Number of slots in a GuestDescription. */
#define MERCURY_GUEST_SLOTS_MAX 16
/* The type byte of every request (bits 15:8 of its number). */
#define MERCURY_IOC_TYPE 245
/* Fills a SystemInfo. */
#define MERCURY_IOC_SYSTEM _UL(0xc130f500)
/* Fills a CpuFacts for the CPU that it names. Returns ENXIO if that CPU is offline. */
#define MERCURY_IOC_FACTS _UL(0xc2c8f501)
/*
 * Bit of CpuFacts::cpu, in: control and table registers and the MSRs of system calls
 * alone. Reading these causes no exit of an attached CPU. All other fields are zero.
 */
#define MERCURY_FACTS_REGISTERS _UL(0x80000000)
/* Pre-caches the hypervisor in memory. Argument: a LoadRequest. */
#define MERCURY_IOC_LOAD _UL(0xc028f502)
/* Frees the pre-cached hypervisor; all CPUs must be native. Argument: a LoadRequest. */
#define MERCURY_IOC_UNLOAD _UL(0xc028f503)
/* Attaches CPUs; attached CPUs stay so. Argument: a SwitchRequest. */
#define MERCURY_IOC_ATTACH _UL(0xc040f504)
/* Detaches CPUs; native CPUs stay so. Argument: a SwitchRequest. */
#define MERCURY_IOC_DETACH _UL(0xc040f505)
/* Fills an array of CpuStatus. Argument: a StatusRequest. */
#define MERCURY_IOC_STATUS _UL(0xc018f506)
/* Measures hypercall round trips. Argument: a MeasureRequest. */
#define MERCURY_IOC_MEASURE _UL(0xc038f507)
/*
 * Arms a fault point. Returns ENOTTY in builds without fault injection. Argument: a
 * FaultRequest.
 */
#define MERCURY_IOC_FAULT _UL(0xc024f508)
/*
 * Begins a snapshot of memory; all CPUs must be attached. Argument: a SnapshotRequest,
 * with the same input as MERCURY_IOC_SNAPSHOT_PREPARE if that came before.
 */
#define MERCURY_IOC_SNAPSHOT_BEGIN _UL(0xc1f8f509)
/* Reads frames of the snapshot. Argument: a SnapshotReadRequest. */
#define MERCURY_IOC_SNAPSHOT_READ _UL(0xc060f50a)
/* Ends the snapshot. Argument: a SnapshotRequest. */
#define MERCURY_IOC_SNAPSHOT_END _UL(0xc1f8f50b)
/* Describes the machine of the snapshot, begun or prepared. Argument: a RestartRequest. */
#define MERCURY_IOC_SNAPSHOT_MACHINE _UL(0xc058f50c)
/*
 * Allocates everything that a snapshot needs, so that the instant spends no time on it.
 * Argument: a SnapshotRequest.
 */
#define MERCURY_IOC_SNAPSHOT_PREPARE _UL(0xc1f8f510)
/*
 * Puts the machine back to the kept snapshot. Returns only if that fails. Argument: a
 * SnapshotRequest.
 */
#define MERCURY_IOC_ROLLBACK _UL(0xc1f8f511)
/*
 * Prepares the restart of another machine in place of this one. Argument: a
 * RestartRequest.
 */
#define MERCURY_IOC_RESTORE_BEGIN _UL(0xc058f50d)
/* Loads frames of that machine. Argument: a LoadFramesRequest. */
#define MERCURY_IOC_RESTORE_LOAD _UL(0xc038f50e)
/*
 * Stops this system and starts that machine. Returns only if that fails. Argument: a
 * LoadRequest.
 */
#define MERCURY_IOC_RESTORE_GO _UL(0xc028f50f)
/* Drops all packets from the instant of the next snapshot on. Argument: a FenceRequest. */
#define MERCURY_IOC_FENCE _UL(0xc040f512)
/*
 * Reads frames of a prepared snapshot, as they are now. A frame may change meanwhile: a
 * caller that needs its content at one instant compares afterwards. Argument: a
 * SnapshotReadRequest.
 */
#define MERCURY_IOC_SNAPSHOT_READ_PRESENT _UL(0xc060f518)
/*
 * Reads loaded frames back, from where they lie. Argument: a LoadFramesRequest, whose
 * data is written.
 */
#define MERCURY_IOC_RESTORE_READ _UL(0xc038f519)
/*
 * Begins a dirty log of the writes of CPUs and devices, before the instant of a
 * prepared snapshot with MERCURY_SNAPSHOT_TRACK. Argument: a LogRequest.
 */
#define MERCURY_IOC_LOG_BEGIN _UL(0xc030f51a)
/*
 * Collects the frames that may have been written since the last collection, or since
 * the log began. From here on MERCURY_READ_LOGGED refers to them. After the instant:
 * the frames that may have been written before it. Argument: a LogRequest.
 */
#define MERCURY_IOC_LOG_COLLECT _UL(0xc030f51b)
/* Begins, collects or ends a dirty log of a disk. Argument: a DiskLogRequest. */
#define MERCURY_IOC_DISK_LOG _UL(0xc048f51c)
/* Reads a page of the firmware's memory. Argument: a FirmwareRequest. */
#define MERCURY_IOC_FIRMWARE _UL(0xc030f51d)
/* Starts the watch, changes its acts, or stops it. Argument: a WatchRequest. */
#define MERCURY_IOC_WATCH _UL(0xc0d8f51e)
/* Fills a WatchRequest with the state of the watch. */
#define MERCURY_IOC_WATCH_STATUS _UL(0xc0d8f51f)
/* Bit of WatchRequest::acts: CPUs are watched. Every other bit needs it. */
#define MERCURY_WATCH_ON 1
/*
 * Bit of WatchRequest::acts: a hang becomes a panic if there is no snapshot to go back
 * to. Without this bit a hang is reported.
 */
#define MERCURY_WATCH_PANIC 2
/*
 * Bit of WatchRequest::acts: an oops puts the machine back to its snapshot if the
 * kernel is likely to die of it: in a kernel thread, in an interrupt, or with a
 * spinlock held.
 */
#define MERCURY_WATCH_OOPS_FATAL 4
/* Bit of WatchRequest::acts: every oops puts the machine back to its snapshot. */
#define MERCURY_WATCH_OOPS 8
/* All bits of WatchRequest::acts. */
#define MERCURY_WATCH_ACTS 15
/* Bit of WatchRequest::tiers: the HPET sends NMIs to all CPUs. */
#define MERCURY_WATCH_TIER_HPET 1
/* Bit of WatchRequest::tiers: each CPU's counter of cycles sends it NMIs. */
#define MERCURY_WATCH_TIER_PERF 2
/*
 * Mends memory that the kernel maps read-only, while all CPUs stand still. Argument: a
 * MendRequest.
 */
#define MERCURY_IOC_MEND _UL(0xc070f521)
/* Size of the largest part of memory that one request mends. */
#define MERCURY_MEND_MAX 32
/*
 * Has the hypervisor execute an crate::gate::IntegrityCall on a CPU. Argument: an
 * IntegrityRequest.
 */
#define MERCURY_IOC_INTEGRITY _UL(0xc038f522)
/*
 * Describes the life that ended last, whose memory MERCURY_IOC_SNAPSHOT_READ reads, or
 * gives that memory back. Argument: a PostmortemRequest.
 */
#define MERCURY_IOC_POSTMORTEM _UL(0xc190f520)
/* Flag of PostmortemRequest::flags: give the memory back. */
#define MERCURY_POSTMORTEM_DROP 1
/*
 * Value of DiskLogRequest::what: begin a log. It holds all writes from here on, and
 * ends with the controller.
 */
#define MERCURY_DISK_LOG_BEGIN 0
/*
 * Value of DiskLogRequest::what: collect the chunks that may have been written since
 * the last collection, or since the begin.
 */
#define MERCURY_DISK_LOG_COLLECT 1
/* Value of DiskLogRequest::what: end the log. */
#define MERCURY_DISK_LOG_END 2
/* Largest number of disks that can have a log at the same time. */
#define MERCURY_DISK_LOGS_MAX 16
/* Least DiskLogRequest::chunk_shift: chunks of 64 KiB. */
#define MERCURY_DISK_CHUNK_SHIFT_MIN 16
/* Largest DiskLogRequest::chunk_shift: chunks of 1 MiB. */
#define MERCURY_DISK_CHUNK_SHIFT_MAX 20
/* Flag of SnapshotRequest::flags: keep a dirty log from the instant on. */
#define MERCURY_SNAPSHOT_LOG 1
/*
 * Flag of SnapshotRequest::flags: hash every page at the instant (fault-injection
 * builds only).
 */
#define MERCURY_SNAPSHOT_HASH 2
/*
 * Flag of SnapshotRequest::flags: keep the snapshot for a rollback. It outlives the
 * process. It ends on request, or when all CPUs are detached.
 */
#define MERCURY_SNAPSHOT_KEEP 4
/*
 * Flag of SnapshotRequest::flags, with MERCURY_SNAPSHOT_KEEP: the snapshot ends when
 * the machine was put back to it.
 */
#define MERCURY_SNAPSHOT_ONCE 16
/* Flag of SnapshotRequest::flags: reserve memory for a dirty log before the instant. */
#define MERCURY_SNAPSHOT_TRACK 8
/*
 * Value of SnapshotRequest::swap_pages: every active swap area lies in memory, as zram
 * does.
 */
#define MERCURY_SWAP_IN_MEMORY _UL(0xffffffffffffffff)
/*
 * Flag of SnapshotReadRequest::flags: read only frames that the last collection of the
 * dirty log found.
 */
#define MERCURY_READ_LOGGED 1
/* Flag of SnapshotReadRequest::flags: skip frames that were free at the instant. */
#define MERCURY_READ_USED 2
/* Bit of SystemInfo::features: this build has fault points. */
#define MERCURY_FEATURE_FAULT_INJECTION 1
/*
 * Bit of SystemInfo::features: this machine is a guest, and its monitor stands in for
 * the hypervisor at a snapshot that is read while no CPU is attached and the hypervisor
 * is not loaded.
 */
#define MERCURY_FEATURE_MONITOR 2
/*
 * Value of SystemInfo::state and StatusRequest::state: the driver is loaded, the
 * hypervisor is not.
 */
#define MERCURY_STATE_UNLOADED 0
/* State: the hypervisor is pre-cached; every CPU is native. */
#define MERCURY_STATE_LOADED 1
/* State: at least one CPU is meant to be attached. */
#define MERCURY_STATE_ATTACHED 2
/* State: the hypervisor crashed. Unload and load it before the next attach. */
#define MERCURY_STATE_CRASHED 3
/* Flag of FenceRequest::flags: take the fence away. */
#define MERCURY_FENCE_DOWN 1
/*
 * Flag of FenceRequest::flags: the active fence outlives its controller, until a
 * controller takes it away.
 */
#define MERCURY_FENCE_STAYS 2
/*
 * Flag of FenceRequest::flags: in a machine that comes back to the instant, the fence
 * is closed for all peers until a controller there takes it away.
 */
#define MERCURY_FENCE_RETURN 4
/* Flag of FenceRequest::flags: the fence stays open in the machine that goes on. */
#define MERCURY_FENCE_OPEN_HERE 8
/*
 * Flag of FenceRequest::flags, with MERCURY_FENCE_DOWN: end IPsec's security
 * associations in all network namespaces before the fence is taken away.
 */
#define MERCURY_FENCE_FORGET 16
/* Largest FenceRequest::peers_count. */
#define MERCURY_FENCE_PEERS_MAX 64
/* Value of CpuStatus::mode: the CPU is offline. */
#define MERCURY_MODE_OFFLINE 0
/* Value of CpuStatus::mode: the CPU answered that it runs on the bare hardware. */
#define MERCURY_MODE_NATIVE 1
/* Value of CpuStatus::mode: the CPU answered that the hypervisor runs below it. */
#define MERCURY_MODE_ATTACHED 2
/* Flag of SwitchRequest::flags: run the preflight checks and switch no CPU. */
#define MERCURY_SWITCH_CHECK_ONLY 1
/*
 * Flag of SwitchRequest::flags for a detach: CPUs that come online later attach as
 * before. Otherwise a detach leaves them native.
 */
#define MERCURY_SWITCH_FOR_NOW 2

/* Codes of refusals and departures (`mercury explain`). */
#define MERCURY_CODE_OK 0
#define MERCURY_CODE_ABI_MISMATCH 1
#define MERCURY_CODE_BAD_ARGUMENT 2
#define MERCURY_CODE_NOT_LOADED 3
#define MERCURY_CODE_ALREADY_LOADED 4
#define MERCURY_CODE_STILL_ATTACHED 5
#define MERCURY_CODE_BUSY 6
#define MERCURY_CODE_CPU_OFFLINE 7
#define MERCURY_CODE_GOING_DOWN 8
#define MERCURY_CODE_BAD_IMAGE 9
#define MERCURY_CODE_UNKNOWN_OPERATION 10
#define MERCURY_CODE_CRASHED 11
#define MERCURY_CODE_ORPHANED_HYPERVISOR 12
#define MERCURY_CODE_LOCKED_DOWN 13
#define MERCURY_CODE_NO_CONTIGUOUS_MEMORY 20
#define MERCURY_CODE_NO_MEMORY 21
#define MERCURY_CODE_NEED_PAGES 22
#define MERCURY_CODE_MORE 23
#define MERCURY_CODE_VENDOR_UNSUPPORTED 40
#define MERCURY_CODE_FAMILY_UNSUPPORTED 41
#define MERCURY_CODE_NO_SVM 42
#define MERCURY_CODE_SVM_DISABLED 43
#define MERCURY_CODE_NO_NESTED_PAGING 44
#define MERCURY_CODE_NO_ASIDS 45
#define MERCURY_CODE_INIT_REDIRECTED 46
#define MERCURY_CODE_VIRTUALIZATION_IN_USE 47
#define MERCURY_CODE_INTEL_UNSUPPORTED 48
#define MERCURY_CODE_CR0_UNSUPPORTED 50
#define MERCURY_CODE_CR4_UNSUPPORTED 51
#define MERCURY_CODE_EFER_UNSUPPORTED 52
#define MERCURY_CODE_CR3_UNSUPPORTED 53
#define MERCURY_CODE_XSTATE_UNSUPPORTED 54
#define MERCURY_CODE_SUPERVISOR_CET 55
#define MERCURY_CODE_MEMORY_ENCRYPTION 56
#define MERCURY_CODE_SNP_ENABLED 57
#define MERCURY_CODE_PAT_UNSUPPORTED 58
#define MERCURY_CODE_TSC_RATIO 59
#define MERCURY_CODE_INVLPGB_IN_USE 60
#define MERCURY_CODE_MACHINE_CHECK_IN_PROGRESS 61
#define MERCURY_CODE_PAGE_TABLE_ISOLATION 62
#define MERCURY_CODE_SINGLE_STEP 63
#define MERCURY_CODE_MEMORY_BEYOND_MAP 64
#define MERCURY_CODE_CPUS_DIFFER 65
#define MERCURY_CODE_KERNEL_UNTESTED 66
#define MERCURY_CODE_LOCKDOWN 67
#define MERCURY_CODE_FRED 68
#define MERCURY_CODE_PRIVILEGED_LAYER 69
#define MERCURY_CODE_INSIDE_HYPERVISOR 70
#define MERCURY_CODE_SEGMENT_UNREADABLE 71
#define MERCURY_CODE_FACT_UNREADABLE 72
#define MERCURY_CODE_STATE_CHANGED 73
#define MERCURY_CODE_MTRR_INCONSISTENT 74
#define MERCURY_CODE_DEBUG_ACTIVE 75
#define MERCURY_CODE_HSAVE_IN_USE 76
#define MERCURY_CODE_SELF_TEST_FAILED 77
#define MERCURY_CODE_ERAPS_IN_USE 78
#define MERCURY_CODE_NO_VMX 80
#define MERCURY_CODE_VMX_DISABLED 81
#define MERCURY_CODE_NO_EPT 82
#define MERCURY_CODE_NO_UNRESTRICTED_GUEST 83
#define MERCURY_CODE_EPT_UNSUPPORTED 84
#define MERCURY_CODE_VMX_CONTROL_FORCED 85
#define MERCURY_CODE_VMX_CONTROL_MISSING 86
#define MERCURY_CODE_VMX_INSTRUCTION_LOST 87
#define MERCURY_CODE_VMX_FIXED_BITS 88
#define MERCURY_CODE_PROCESSOR_TRACE 89
#define MERCURY_CODE_VMX_REGION 90
#define MERCURY_CODE_DEBUG_STORE 91
#define MERCURY_CODE_INVALID_GUEST_STATE 100
#define MERCURY_CODE_INJECTED_FAULT 101
#define MERCURY_CODE_FAULT_IN_SWITCH 102
#define MERCURY_CODE_WRONG_MODE 103
#define MERCURY_CODE_HOST_EXCEPTION 120
#define MERCURY_CODE_HOST_PANIC 121
#define MERCURY_CODE_UNKNOWN_EXIT 122
#define MERCURY_CODE_SVM_RELEASED 123
#define MERCURY_CODE_MICROCODE_UPDATE 124
#define MERCURY_CODE_CPU_RESET 125
#define MERCURY_CODE_NESTED_MAP_EXHAUSTED 126
#define MERCURY_CODE_VMX_RELEASED 127
#define MERCURY_CODE_MTRR_CHANGED 128
#define MERCURY_CODE_GUEST_UNSUPPORTED 129
#define MERCURY_CODE_SNAPSHOT_LIVE 140
#define MERCURY_CODE_NO_SNAPSHOT 141
#define MERCURY_CODE_SNAPSHOT_MISSED 142
#define MERCURY_CODE_SNAPSHOT_POOL 143
#define MERCURY_CODE_SNAPSHOT_LOST 144
#define MERCURY_CODE_SNAPSHOT_DEVICES 145
#define MERCURY_CODE_SNAPSHOT_QUIESCE 146
#define MERCURY_CODE_SNAPSHOT_HOTPLUG 147
#define MERCURY_CODE_FENCE_UNSUPPORTED 148
#define MERCURY_CODE_SNAPSHOT_GUEST 149
#define MERCURY_CODE_SNAPSHOT_SWAP 153
#define MERCURY_CODE_ROLLBACK_UNSUPPORTED 150
#define MERCURY_CODE_ROLLBACK_MISSED 151
#define MERCURY_CODE_ROLLBACK_DEVICES 152
#define MERCURY_CODE_MACSEC_IN_USE 154
#define MERCURY_CODE_ROLLBACK_REPEATED 170
#define MERCURY_CODE_NO_POST_MORTEM 159
#define MERCURY_CODE_LOG_UNSUPPORTED 155
#define MERCURY_CODE_DISK_UNSUPPORTED 156
#define MERCURY_CODE_DISK_LOGGED 157
#define MERCURY_CODE_NO_DISK_LOG 158
#define MERCURY_CODE_RESTORE_CPUS 160
#define MERCURY_CODE_RESTORE_MODE 161
#define MERCURY_CODE_RESTORE_OVERLAP 162
#define MERCURY_CODE_RESTORE_ROOM 163
#define MERCURY_CODE_RESTORE_INCOMPLETE 164
#define MERCURY_CODE_RESTORE_FRAME 165
#define MERCURY_CODE_RESTORE_QUIESCE 166
#define MERCURY_CODE_RESTORE_MEMORY 167
#define MERCURY_CODE_WATCH_NO_HPET 171
#define MERCURY_CODE_WATCH_HPET_BUSY 172
#define MERCURY_CODE_WATCH_REMAPPED 173
#define MERCURY_CODE_WATCH_NO_PIN 174
#define MERCURY_CODE_WATCH_SILENT 175
#define MERCURY_CODE_WATCH_NO_PMU 176
#define MERCURY_CODE_MEND_NOT_READ_ONLY 177
#define MERCURY_CODE_MEND_CHANGED 178
#define MERCURY_CODE_INTEGRITY_UNREADABLE 179
#define MERCURY_CODE_SWAP_IN_USE 180
#define MERCURY_CODE_DEVICES_UNSEEN 181
#define MERCURY_CODE_CPUS_OFFLINE 182
#define MERCURY_CODE_WATCHDOG_UNFED 183
#define MERCURY_CODE_CARDS_BUNDLED 184
#define MERCURY_CODE_DISKS_STAY_BEHIND 185
#define MERCURY_CODE_NFS_SESSIONS 186
#define MERCURY_CODE_DISKS_UNCOMPARABLE 187
#define MERCURY_CODE_NO_PLACE_FOR_TOMBSTONE 188
#define MERCURY_CODE_DISKS_UNHELD 189
#define MERCURY_CODE_DRIVER_MISSING 190
#define MERCURY_CODE_NO_MODPROBE 191
#define MERCURY_CODE_DRIVER_FOREIGN 192
#define MERCURY_CODE_MEMORY_FORGOTTEN 193
#define MERCURY_CODE_BAD_RULES 194
#define MERCURY_CODE_SENSOR_ALARM 195
#define MERCURY_CODE_SENSOR_SILENT 196
#define MERCURY_CODE_SERVICE_SILENT 197
#define MERCURY_CODE_NO_DESTINATION 198
#define MERCURY_CODE_ROLLBACK_IN_VAIN 199

/* Offsets in the gate block, for assembler. */
#define MERCURY_GATE_HOST_CR3 0
#define MERCURY_GATE_HOST_CR4 8
#define MERCURY_GATE_ENTRY_VIRT 16
#define MERCURY_GATE_LEAVE_VIRT 24
#define MERCURY_GATE_AREA_PHYS 32
#define MERCURY_GATE_SHARED_VIRT 40
#define MERCURY_GATE_WINDOW_VIRT 48
#define MERCURY_GATE_WINDOW_ENTRY_VIRT 56
#define MERCURY_GATE_CPU 64
#define MERCURY_GATE_OPERATION 68
#define MERCURY_GATE_ARGUMENT 72
#define MERCURY_GATE_DETAIL 80
#define MERCURY_GATE_FAULT 96
#define MERCURY_GATE_FAULT_POINT 96
#define MERCURY_GATE_FAULT_PASSAGE 100
#define MERCURY_GATE_FAULT_OFFSET 104
#define MERCURY_GATE_FAULT_VALUE 108
#define MERCURY_GATE_FAULT_FIRED 112
#define MERCURY_GATE_INWARD 120
#define MERCURY_GATE_INWARD_RSP 120
#define MERCURY_GATE_INWARD_RIP 128
#define MERCURY_GATE_INWARD_RFLAGS 136
#define MERCURY_GATE_INWARD_CR3 144
#define MERCURY_GATE_INWARD_CR4 152
#define MERCURY_GATE_INWARD_EFER 160
#define MERCURY_GATE_INWARD_VM_HSAVE_PA 168
#define MERCURY_GATE_INWARD_CS 176
#define MERCURY_GATE_INWARD_CS_SELECTOR 176
#define MERCURY_GATE_INWARD_CS_ATTRIBUTES 178
#define MERCURY_GATE_INWARD_CS_LIMIT 180
#define MERCURY_GATE_INWARD_CS_BASE 184
#define MERCURY_GATE_INWARD_SS 192
#define MERCURY_GATE_INWARD_SS_SELECTOR 192
#define MERCURY_GATE_INWARD_SS_ATTRIBUTES 194
#define MERCURY_GATE_INWARD_SS_LIMIT 196
#define MERCURY_GATE_INWARD_SS_BASE 200
#define MERCURY_GATE_INWARD_DS 208
#define MERCURY_GATE_INWARD_DS_SELECTOR 208
#define MERCURY_GATE_INWARD_DS_ATTRIBUTES 210
#define MERCURY_GATE_INWARD_DS_LIMIT 212
#define MERCURY_GATE_INWARD_DS_BASE 216
#define MERCURY_GATE_INWARD_ES 224
#define MERCURY_GATE_INWARD_ES_SELECTOR 224
#define MERCURY_GATE_INWARD_ES_ATTRIBUTES 226
#define MERCURY_GATE_INWARD_ES_LIMIT 228
#define MERCURY_GATE_INWARD_ES_BASE 232
#define MERCURY_GATE_INWARD_FS 240
#define MERCURY_GATE_INWARD_FS_SELECTOR 240
#define MERCURY_GATE_INWARD_FS_ATTRIBUTES 242
#define MERCURY_GATE_INWARD_FS_LIMIT 244
#define MERCURY_GATE_INWARD_FS_BASE 248
#define MERCURY_GATE_INWARD_GS 256
#define MERCURY_GATE_INWARD_GS_SELECTOR 256
#define MERCURY_GATE_INWARD_GS_ATTRIBUTES 258
#define MERCURY_GATE_INWARD_GS_LIMIT 260
#define MERCURY_GATE_INWARD_GS_BASE 264
#define MERCURY_GATE_INWARD_LDTR 272
#define MERCURY_GATE_INWARD_LDTR_SELECTOR 272
#define MERCURY_GATE_INWARD_LDTR_ATTRIBUTES 274
#define MERCURY_GATE_INWARD_LDTR_LIMIT 276
#define MERCURY_GATE_INWARD_LDTR_BASE 280
#define MERCURY_GATE_INWARD_TR 288
#define MERCURY_GATE_INWARD_TR_SELECTOR 288
#define MERCURY_GATE_INWARD_TR_ATTRIBUTES 290
#define MERCURY_GATE_INWARD_TR_LIMIT 292
#define MERCURY_GATE_INWARD_TR_BASE 296
#define MERCURY_GATE_INWARD_LDTR_BASE_VIRT 304
#define MERCURY_GATE_INWARD_TR_BASE_VIRT 312
#define MERCURY_GATE_INWARD_GDTR 320
#define MERCURY_GATE_INWARD_GDTR_PADDING 320
#define MERCURY_GATE_INWARD_GDTR_LIMIT 326
#define MERCURY_GATE_INWARD_GDTR_BASE_VIRT 328
#define MERCURY_GATE_INWARD_IDTR 336
#define MERCURY_GATE_INWARD_IDTR_PADDING 336
#define MERCURY_GATE_INWARD_IDTR_LIMIT 342
#define MERCURY_GATE_INWARD_IDTR_BASE_VIRT 344
#define MERCURY_GATE_OUTWARD 352
#define MERCURY_GATE_OUTWARD_CR0 352
#define MERCURY_GATE_OUTWARD_CR2 360
#define MERCURY_GATE_OUTWARD_CR3 368
#define MERCURY_GATE_OUTWARD_CR4 376
#define MERCURY_GATE_OUTWARD_DR6 384
#define MERCURY_GATE_OUTWARD_DR7 392
#define MERCURY_GATE_OUTWARD_GDTR 400
#define MERCURY_GATE_OUTWARD_GDTR_PADDING 400
#define MERCURY_GATE_OUTWARD_GDTR_LIMIT 406
#define MERCURY_GATE_OUTWARD_GDTR_BASE_VIRT 408
#define MERCURY_GATE_OUTWARD_IDTR 416
#define MERCURY_GATE_OUTWARD_IDTR_PADDING 416
#define MERCURY_GATE_OUTWARD_IDTR_LIMIT 422
#define MERCURY_GATE_OUTWARD_IDTR_BASE_VIRT 424
#define MERCURY_GATE_OUTWARD_DEBUGCTL 432
#define MERCURY_GATE_OUTWARD_SELECTORS 440
#define MERCURY_GATE_OUTWARD_RIP 472
#define MERCURY_GATE_OUTWARD_RFLAGS 480
#define MERCURY_GATE_OUTWARD_REGISTERS 488
#define MERCURY_GATE_OUTWARD_THREAD_SELECTORS 616
#define MERCURY_GATE_OUTWARD_THREAD_BASES 632
#define MERCURY_GATE_OUTWARD_EFER 648
#define MERCURY_GATE_OUTWARD_SVM 656
#define MERCURY_GATE_FRAME 664
#define MERCURY_GATE_MACHINE_CHECK 704
#define MERCURY_GATE_NMI 712
#define MERCURY_GATE_NMI_PENDING 712
#define MERCURY_GATE_NMI_HANDLER_VIRT 720
#define MERCURY_GATE_NMI_WINDOW_START_VIRT 728
#define MERCURY_GATE_NMI_WINDOW_END_VIRT 736
#define MERCURY_GATE_NMI_RESTART_VIRT 744
#define MERCURY_GATE_NMI_GDT 752
#define MERCURY_GATE_NMI_IDT 784
#define MERCURY_GATE_NMI_GDTR 832
#define MERCURY_GATE_NMI_GDTR_PADDING 832
#define MERCURY_GATE_NMI_GDTR_LIMIT 838
#define MERCURY_GATE_NMI_GDTR_BASE_VIRT 840
#define MERCURY_GATE_NMI_IDTR 848
#define MERCURY_GATE_NMI_IDTR_PADDING 848
#define MERCURY_GATE_NMI_IDTR_LIMIT 854
#define MERCURY_GATE_NMI_IDTR_BASE_VIRT 856

/* Offsets in the structures of a restart, for assembler. */
#define MERCURY_SAVED_CPU_VIRT 0
#define MERCURY_SAVED_CPU_CR0 8
#define MERCURY_SAVED_CPU_CR3 16
#define MERCURY_SAVED_CPU_CR4 24
#define MERCURY_SAVED_CPU_RIP 32
#define MERCURY_SAVED_CPU_RSP 40
#define MERCURY_SAVED_CPU_RFLAGS 48
#define MERCURY_SAVED_CPU_REGISTERS 56
#define MERCURY_SAVED_CPU_FS_BASE 104
#define MERCURY_SAVED_CPU_GS_BASE 112
#define MERCURY_SAVED_CPU_KERNEL_GS_BASE 120
#define MERCURY_SAVED_CPU_GDTR 128
#define MERCURY_SAVED_CPU_GDTR_PADDING 128
#define MERCURY_SAVED_CPU_GDTR_LIMIT 134
#define MERCURY_SAVED_CPU_GDTR_BASE_VIRT 136
#define MERCURY_SAVED_CPU_IDTR 144
#define MERCURY_SAVED_CPU_IDTR_PADDING 144
#define MERCURY_SAVED_CPU_IDTR_LIMIT 150
#define MERCURY_SAVED_CPU_IDTR_BASE_VIRT 152
#define MERCURY_SAVED_CPU_DATA_SELECTORS 160
#define MERCURY_SAVED_CPU_SEED 176
#define MERCURY_SAVED_CPU_THREAD 208
#define MERCURY_LANDING_ROOT_PHYS 0
#define MERCURY_LANDING_LIST_PHYS 8
#define MERCURY_LANDING_CPUS_PHYS 16
#define MERCURY_LANDING_RESUME_VIRT 24
#define MERCURY_LANDING_CPUS 32
#define MERCURY_LANDING_ARRIVED 36
#define MERCURY_LANDING_COPIED 40
#define MERCURY_LANDING_RESERVED 44
#define MERCURY_LANDING_LIST_NEXT_PHYS 0
#define MERCURY_LANDING_LIST_COUNT 8
#define MERCURY_LANDING_LIST_COPIES 16

#ifndef __ASSEMBLY__

#include <linux/build_bug.h>
#include <linux/stddef.h>
#include <linux/types.h>

/*
 * Size and version of a structure. Every structure that user space passes to the driver
 * begins with them.
 */
struct mercury_header {
	/* Size in bytes of the whole structure as the caller knows it. */
	u32 size;
	/* MERCURY_ABI_VERSION of the caller's build. */
	u32 version;
};

static_assert(sizeof(struct mercury_header) == 8);
static_assert(offsetof(struct mercury_header, size) == 0);
static_assert(offsetof(struct mercury_header, version) == 4);

/* The four registers that CPUID returns for one leaf. */
struct mercury_cpuid_leaf {
	/* Value of EAX after CPUID. */
	u32 eax;
	/* Value of EBX after CPUID. */
	u32 ebx;
	/* Value of ECX after CPUID. */
	u32 ecx;
	/* Value of EDX after CPUID. */
	u32 edx;
};

static_assert(sizeof(struct mercury_cpuid_leaf) == 16);
static_assert(offsetof(struct mercury_cpuid_leaf, eax) == 0);
static_assert(offsetof(struct mercury_cpuid_leaf, ebx) == 4);
static_assert(offsetof(struct mercury_cpuid_leaf, ecx) == 8);
static_assert(offsetof(struct mercury_cpuid_leaf, edx) == 12);

/* A descriptor-table register (GDTR or IDTR). */
struct mercury_table_register {
	/* Linear address of the table: a kernel virtual address. */
	u64 base_virt;
	/* Limit of the table: its size in bytes less one, at most FFFFh. */
	u64 limit;
};

static_assert(sizeof(struct mercury_table_register) == 16);
static_assert(offsetof(struct mercury_table_register, base_virt) == 0);
static_assert(offsetof(struct mercury_table_register, limit) == 8);

/*
 * The registers and CPUID leaves of one CPU. Leaves and MSRs that the CPU lacks are
 * zero.
 */
struct mercury_cpu_facts {
	/* Size and version of this structure. */
	struct mercury_header header;
	/*
	 * In: the CPU to read, by Linux's number, and MERCURY_FACTS_REGISTERS. Out: the
	 * CPU.
	 */
	u32 cpu;
	/* Initial identifier of the local APIC. */
	u32 apic_id;
	/* Bits of readable: the MSRs that could be read. */
	u64 readable;
	/* Bits of system: properties of the kernel. */
	u64 system;
	/*
	 * Host-physical address of the last byte that RAM or a device occupies, by the
	 * kernel's resource tree.
	 */
	u64 iomem_end_phys;
	/* Linux's version code: major << 16 | minor << 8. */
	u64 kernel_version;
	/* CPUID 0: highest leaf and the vendor's name. */
	struct mercury_cpuid_leaf cpuid_0;
	/*
	 * CPUID 1: family, model and features. EBX holds the APIC identifier and is not
	 * compared between CPUs.
	 */
	struct mercury_cpuid_leaf cpuid_1;
	/* CPUID 7, subleaf 0: extended features. */
	struct mercury_cpuid_leaf cpuid_7_0;
	/* CPUID 7, subleaf 1: further extended features. */
	struct mercury_cpuid_leaf cpuid_7_1;
	/* CPUID Dh, subleaf 1: properties of XSAVE. */
	struct mercury_cpuid_leaf cpuid_d_1;
	/*
	 * CPUID 4000_0000h: name of a hypervisor below, if CPUID 1 ECX bit 31 announces
	 * one.
	 */
	struct mercury_cpuid_leaf cpuid_4000_0000;
	/* CPUID 8000_0000h: highest extended leaf. */
	struct mercury_cpuid_leaf cpuid_8000_0000;
	/* CPUID 8000_0001h: extended features, among them SVM. */
	struct mercury_cpuid_leaf cpuid_8000_0001;
	/* CPUID 8000_0008h: address widths. */
	struct mercury_cpuid_leaf cpuid_8000_0008;
	/* CPUID 8000_000Ah: revision and features of SVM (AMD). */
	struct mercury_cpuid_leaf cpuid_8000_000a;
	/* CPUID 8000_001Fh: features of memory encryption (AMD). */
	struct mercury_cpuid_leaf cpuid_8000_001f;
	/* CPUID 8000_0021h: further extended features (AMD). */
	struct mercury_cpuid_leaf cpuid_8000_0021;
	/* CR0 while the driver reads it. */
	u64 cr0;
	/*
	 * CR3 of the task that the reading interrupts: host-physical root of its page
	 * tables, and flags.
	 */
	u64 cr3;
	/* CR4 while the driver reads it. */
	u64 cr4;
	/*
	 * XCR0: enabled components of the extended state. Zero where CR4.OSXSAVE is
	 * clear.
	 */
	u64 xcr0;
	/* DR6: status of debug exceptions. */
	u64 dr6;
	/* DR7: armed breakpoints. */
	u64 dr7;
	/* RFLAGS in the driver's reading function. */
	u64 rflags;
	/* GDTR: the global descriptor table. */
	struct mercury_table_register gdtr;
	/* IDTR: the interrupt descriptor table. */
	struct mercury_table_register idtr;
	/* Selector in TR, bits 15:0. */
	u64 tr;
	/* Selector in LDTR, bits 15:0. */
	u64 ldtr;
	/* Selector in CS, bits 15:0. */
	u64 cs;
	/* Selector in SS, bits 15:0. */
	u64 ss;
	/*
	 * Limit in bytes of the task-state segment, as LSL returns it for the selector
	 * in TR.
	 */
	u64 tr_limit;
	/* EFER (C000_0080h): long mode, no-execute and SVM. */
	u64 efer;
	/* STAR (C000_0081h): selectors of SYSCALL. */
	u64 star;
	/* LSTAR (C000_0082h): kernel virtual address of SYSCALL's entry. */
	u64 lstar;
	/* CSTAR (C000_0083h): the same for compatibility mode. */
	u64 cstar;
	/* SFMASK (C000_0084h): flags that SYSCALL clears. */
	u64 sfmask;
	/* SYSENTER_CS (174h): selector of SYSENTER. */
	u64 sysenter_cs;
	/* SYSENTER_ESP (175h): kernel virtual address of its stack. */
	u64 sysenter_esp;
	/* SYSENTER_EIP (176h): kernel virtual address of its entry. */
	u64 sysenter_eip;
	/* Base of GS (C000_0101h): the kernel's per-CPU base, virtual. */
	u64 gs_base;
	/* APIC_BASE (1Bh): mode and host-physical address of the local APIC. */
	u64 apic_base;
	/* PAT (277h): eight memory types. */
	u64 pat;
	/* VM_CR (C001_0114h; APM volume 2, section 15.30.1). */
	u64 vm_cr;
	/* VM_HSAVE_PA (C001_0117h; APM volume 2, section 15.30.4): host-physical. */
	u64 vm_hsave_pa;
	/* SYSCFG (C001_0010h), zero on Intel. */
	u64 syscfg;
	/* SPEC_CTRL (48h): speculation controls. */
	u64 spec_ctrl;
	/* TSC_RATIO (C000_0104h): 1.0 is 1 << 32 (AMD). */
	u64 tsc_ratio;
	/* DEBUGCTL (1D9h): recording of branches. */
	u64 debugctl;
	/* S_CET (6A2h): control-flow enforcement of the supervisor. */
	u64 s_cet;
	/* ISST_ADDR (6A8h): table of interrupt shadow stacks, virtual. */
	u64 isst_addr;
	/* XSS (DA0h): supervisor components of the extended state. */
	u64 xss;
	/* MCG_STATUS (17Ah): bit 2 is set during a machine check. */
	u64 mcg_status;
	/* TSC_AUX (C000_0103h): Linux keeps the CPU's number there. */
	u64 tsc_aux;
	/* HWCR (C001_0015h): hardware configuration (AMD). */
	u64 hwcr;
	/* Revision of the microcode, as MSR 8Bh returns it. */
	u64 microcode;
	/* MCA_CTL of SMCA bank 0 (C000_2000h; AMD). */
	u64 smca_ctl0;
	/* IA32_FEATURE_CONTROL (3Ah): lock and enable bits of VMX (Intel). */
	u64 feature_control;
	/* MTRRdefType (2FFh): default memory type, and bits that enable the MTRRs. */
	u64 mtrr_def_type;
	/* FNV-1a digest over all MTRRs, by which CPUs are compared. */
	u64 mtrr_digest;
	/* IA32_VMX_BASIC (480h; Intel, SDM volume 3, appendix A.1). */
	u64 vmx_basic;
	/*
	 * IA32_VMX_TRUE_PINBASED_CTLS (48Dh), or IA32_VMX_PINBASED_CTLS (481h) where
	 * IA32_VMX_BASIC bit 55 is clear. Bits 31:0: controls that must be 1; bits
	 * 63:32: controls that may be 1 (appendix A.3.1).
	 */
	u64 vmx_pin_controls;
	/*
	 * IA32_VMX_TRUE_PROCBASED_CTLS (48Eh) or IA32_VMX_PROCBASED_CTLS (482h), by the
	 * same rule (appendix A.3.2).
	 */
	u64 vmx_primary_controls;
	/* IA32_VMX_PROCBASED_CTLS2 (48Bh; appendix A.3.3). */
	u64 vmx_secondary_controls;
	/* IA32_VMX_PROCBASED_CTLS3 (492h; appendix A.3.4): each set bit may be 1. */
	u64 vmx_tertiary_controls;
	/* IA32_VMX_TRUE_EXIT_CTLS (48Fh) or IA32_VMX_EXIT_CTLS (483h; appendix A.4). */
	u64 vmx_exit_controls;
	/* IA32_VMX_TRUE_ENTRY_CTLS (490h) or IA32_VMX_ENTRY_CTLS (484h; appendix A.5). */
	u64 vmx_entry_controls;
	/* IA32_VMX_MISC (485h; appendix A.6). */
	u64 vmx_misc;
	/* IA32_VMX_CR0_FIXED0 (486h; appendix A.7): bits of CR0 that must be 1. */
	u64 vmx_cr0_fixed0;
	/* IA32_VMX_CR0_FIXED1 (487h; appendix A.7): bits of CR0 that may be 1. */
	u64 vmx_cr0_fixed1;
	/* IA32_VMX_CR4_FIXED0 (488h; appendix A.8): bits of CR4 that must be 1. */
	u64 vmx_cr4_fixed0;
	/* IA32_VMX_CR4_FIXED1 (489h; appendix A.8): bits of CR4 that may be 1. */
	u64 vmx_cr4_fixed1;
	/* IA32_VMX_EPT_VPID_CAP (48Ch; appendix A.10). */
	u64 vmx_ept_vpid;
	/* IA32_RTIT_CTL (570h): bit 0 is set while processor trace runs (Intel). */
	u64 rtit_ctl;
	/* IA32_PEBS_ENABLE (3F1h), or 0 on a CPU without PEBS (Intel). */
	u64 pebs_enable;
};

static_assert(sizeof(struct mercury_cpu_facts) == 712);
static_assert(offsetof(struct mercury_cpu_facts, header) == 0);
static_assert(offsetof(struct mercury_cpu_facts, cpu) == 8);
static_assert(offsetof(struct mercury_cpu_facts, apic_id) == 12);
static_assert(offsetof(struct mercury_cpu_facts, readable) == 16);
static_assert(offsetof(struct mercury_cpu_facts, system) == 24);
static_assert(offsetof(struct mercury_cpu_facts, iomem_end_phys) == 32);
static_assert(offsetof(struct mercury_cpu_facts, kernel_version) == 40);
static_assert(offsetof(struct mercury_cpu_facts, cpuid_0) == 48);
static_assert(offsetof(struct mercury_cpu_facts, cpuid_1) == 64);
static_assert(offsetof(struct mercury_cpu_facts, cpuid_7_0) == 80);
static_assert(offsetof(struct mercury_cpu_facts, cpuid_7_1) == 96);
static_assert(offsetof(struct mercury_cpu_facts, cpuid_d_1) == 112);
static_assert(offsetof(struct mercury_cpu_facts, cpuid_4000_0000) == 128);
static_assert(offsetof(struct mercury_cpu_facts, cpuid_8000_0000) == 144);
static_assert(offsetof(struct mercury_cpu_facts, cpuid_8000_0001) == 160);
static_assert(offsetof(struct mercury_cpu_facts, cpuid_8000_0008) == 176);
static_assert(offsetof(struct mercury_cpu_facts, cpuid_8000_000a) == 192);
static_assert(offsetof(struct mercury_cpu_facts, cpuid_8000_001f) == 208);
static_assert(offsetof(struct mercury_cpu_facts, cpuid_8000_0021) == 224);
static_assert(offsetof(struct mercury_cpu_facts, cr0) == 240);
static_assert(offsetof(struct mercury_cpu_facts, cr3) == 248);
static_assert(offsetof(struct mercury_cpu_facts, cr4) == 256);
static_assert(offsetof(struct mercury_cpu_facts, xcr0) == 264);
static_assert(offsetof(struct mercury_cpu_facts, dr6) == 272);
static_assert(offsetof(struct mercury_cpu_facts, dr7) == 280);
static_assert(offsetof(struct mercury_cpu_facts, rflags) == 288);
static_assert(offsetof(struct mercury_cpu_facts, gdtr) == 296);
static_assert(offsetof(struct mercury_cpu_facts, idtr) == 312);
static_assert(offsetof(struct mercury_cpu_facts, tr) == 328);
static_assert(offsetof(struct mercury_cpu_facts, ldtr) == 336);
static_assert(offsetof(struct mercury_cpu_facts, cs) == 344);
static_assert(offsetof(struct mercury_cpu_facts, ss) == 352);
static_assert(offsetof(struct mercury_cpu_facts, tr_limit) == 360);
static_assert(offsetof(struct mercury_cpu_facts, efer) == 368);
static_assert(offsetof(struct mercury_cpu_facts, star) == 376);
static_assert(offsetof(struct mercury_cpu_facts, lstar) == 384);
static_assert(offsetof(struct mercury_cpu_facts, cstar) == 392);
static_assert(offsetof(struct mercury_cpu_facts, sfmask) == 400);
static_assert(offsetof(struct mercury_cpu_facts, sysenter_cs) == 408);
static_assert(offsetof(struct mercury_cpu_facts, sysenter_esp) == 416);
static_assert(offsetof(struct mercury_cpu_facts, sysenter_eip) == 424);
static_assert(offsetof(struct mercury_cpu_facts, gs_base) == 432);
static_assert(offsetof(struct mercury_cpu_facts, apic_base) == 440);
static_assert(offsetof(struct mercury_cpu_facts, pat) == 448);
static_assert(offsetof(struct mercury_cpu_facts, vm_cr) == 456);
static_assert(offsetof(struct mercury_cpu_facts, vm_hsave_pa) == 464);
static_assert(offsetof(struct mercury_cpu_facts, syscfg) == 472);
static_assert(offsetof(struct mercury_cpu_facts, spec_ctrl) == 480);
static_assert(offsetof(struct mercury_cpu_facts, tsc_ratio) == 488);
static_assert(offsetof(struct mercury_cpu_facts, debugctl) == 496);
static_assert(offsetof(struct mercury_cpu_facts, s_cet) == 504);
static_assert(offsetof(struct mercury_cpu_facts, isst_addr) == 512);
static_assert(offsetof(struct mercury_cpu_facts, xss) == 520);
static_assert(offsetof(struct mercury_cpu_facts, mcg_status) == 528);
static_assert(offsetof(struct mercury_cpu_facts, tsc_aux) == 536);
static_assert(offsetof(struct mercury_cpu_facts, hwcr) == 544);
static_assert(offsetof(struct mercury_cpu_facts, microcode) == 552);
static_assert(offsetof(struct mercury_cpu_facts, smca_ctl0) == 560);
static_assert(offsetof(struct mercury_cpu_facts, feature_control) == 568);
static_assert(offsetof(struct mercury_cpu_facts, mtrr_def_type) == 576);
static_assert(offsetof(struct mercury_cpu_facts, mtrr_digest) == 584);
static_assert(offsetof(struct mercury_cpu_facts, vmx_basic) == 592);
static_assert(offsetof(struct mercury_cpu_facts, vmx_pin_controls) == 600);
static_assert(offsetof(struct mercury_cpu_facts, vmx_primary_controls) == 608);
static_assert(offsetof(struct mercury_cpu_facts, vmx_secondary_controls) == 616);
static_assert(offsetof(struct mercury_cpu_facts, vmx_tertiary_controls) == 624);
static_assert(offsetof(struct mercury_cpu_facts, vmx_exit_controls) == 632);
static_assert(offsetof(struct mercury_cpu_facts, vmx_entry_controls) == 640);
static_assert(offsetof(struct mercury_cpu_facts, vmx_misc) == 648);
static_assert(offsetof(struct mercury_cpu_facts, vmx_cr0_fixed0) == 656);
static_assert(offsetof(struct mercury_cpu_facts, vmx_cr0_fixed1) == 664);
static_assert(offsetof(struct mercury_cpu_facts, vmx_cr4_fixed0) == 672);
static_assert(offsetof(struct mercury_cpu_facts, vmx_cr4_fixed1) == 680);
static_assert(offsetof(struct mercury_cpu_facts, vmx_ept_vpid) == 688);
static_assert(offsetof(struct mercury_cpu_facts, rtit_ctl) == 696);
static_assert(offsetof(struct mercury_cpu_facts, pebs_enable) == 704);

/* One entry of the log ring, 64 bytes. */
struct mercury_log_record {
	/*
	 * Number of this record on this CPU, counting from 1; 0 while the hypervisor
	 * writes it.
	 */
	u64 sequence;
	/* TSC at the time of the event. */
	u64 tsc;
	/* LogKind as a number. */
	u32 kind;
	/* Linux's number of the CPU that wrote the record. */
	u32 cpu;
	/* Arguments of the event, by its kind. */
	u64 arguments[5];
};

static_assert(sizeof(struct mercury_log_record) == 64);
static_assert(offsetof(struct mercury_log_record, sequence) == 0);
static_assert(offsetof(struct mercury_log_record, tsc) == 8);
static_assert(offsetof(struct mercury_log_record, kind) == 16);
static_assert(offsetof(struct mercury_log_record, cpu) == 20);
static_assert(offsetof(struct mercury_log_record, arguments) == 24);

/*
 * The crash record: the CPU's state when the hypervisor gave up on this CPU. It stays
 * until unload.
 */
struct mercury_crash_record {
	/* crate::code::Code as a number; 0: no crash. */
	u32 code;
	/* Exception vector, 0 to 31; u32::MAX if there was no exception. */
	u32 vector;
	/* TSC at the time of the crash. */
	u64 tsc;
	/* RIP of the hypervisor in bytes from the image's start, as addr2line wants it. */
	u64 host_rip_offset;
	/* RSP of the hypervisor: host-virtual. */
	u64 host_rsp_virt;
	/* Error code of the exception, 0 if it has none. */
	u64 error_code;
	/* CR2 of the hypervisor: host-virtual address of its page fault. */
	u64 host_cr2;
	/*
	 * Exit code of the last exit, as the processor gave it; on Intel with
	 * EXIT_CODE_VMX.
	 */
	u64 exit_code;
	/*
	 * EXITINFO1 of that exit (AMD: APM volume 2, section 15.6), or the exit
	 * qualification (Intel).
	 */
	u64 exit_info1;
	/* EXITINFO2 of that exit (AMD), or the guest-physical address (Intel). */
	u64 exit_info2;
	/* Event in delivery at the exit, in the format of the control block. */
	u64 exit_event;
	/* RIP of the system: its virtual address. */
	u64 guest_rip;
	/* RFLAGS of the system. */
	u64 guest_rflags;
	/* CR0 of the system. */
	u64 guest_cr0;
	/* CR2 of the system: linear address of its last page fault. */
	u64 guest_cr2;
	/* CR3 of the system: guest-physical root and flags. */
	u64 guest_cr3;
	/* CR4 of the system. */
	u64 guest_cr4;
	/* Selectors of the system: CS in bits 15:0, SS in bits 31:16. */
	u64 guest_cs_ss;
	/* General registers of the system. */
	u64 guest_registers[16];
	/* Panic message or name of the fault point, NUL-padded. */
	u8 message[120];
};

static_assert(sizeof(struct mercury_crash_record) == 384);
static_assert(offsetof(struct mercury_crash_record, code) == 0);
static_assert(offsetof(struct mercury_crash_record, vector) == 4);
static_assert(offsetof(struct mercury_crash_record, tsc) == 8);
static_assert(offsetof(struct mercury_crash_record, host_rip_offset) == 16);
static_assert(offsetof(struct mercury_crash_record, host_rsp_virt) == 24);
static_assert(offsetof(struct mercury_crash_record, error_code) == 32);
static_assert(offsetof(struct mercury_crash_record, host_cr2) == 40);
static_assert(offsetof(struct mercury_crash_record, exit_code) == 48);
static_assert(offsetof(struct mercury_crash_record, exit_info1) == 56);
static_assert(offsetof(struct mercury_crash_record, exit_info2) == 64);
static_assert(offsetof(struct mercury_crash_record, exit_event) == 72);
static_assert(offsetof(struct mercury_crash_record, guest_rip) == 80);
static_assert(offsetof(struct mercury_crash_record, guest_rflags) == 88);
static_assert(offsetof(struct mercury_crash_record, guest_cr0) == 96);
static_assert(offsetof(struct mercury_crash_record, guest_cr2) == 104);
static_assert(offsetof(struct mercury_crash_record, guest_cr3) == 112);
static_assert(offsetof(struct mercury_crash_record, guest_cr4) == 120);
static_assert(offsetof(struct mercury_crash_record, guest_cs_ss) == 128);
static_assert(offsetof(struct mercury_crash_record, guest_registers) == 136);
static_assert(offsetof(struct mercury_crash_record, message) == 264);

/* The block of one CPU. */
struct mercury_shared_cpu {
	/* SHARED_MAGIC while the hypervisor is loaded. */
	u64 magic;
	/* Linux's number of this CPU. */
	u32 cpu;
	/*
	 * 1 while this CPU is attached, by the hypervisor's last write. Only the CPU
	 * itself can answer for certain.
	 */
	u32 attached;
	/* Number of exits since load, by ExitReason. */
	u64 exits[24];
	/* TSC ticks that exits spent in the hypervisor since load. */
	u64 exit_ticks;
	/* Number of attaches of this CPU since load. */
	u64 attaches;
	/* Number of detaches of this CPU since load, of every kind. */
	u64 detaches;
	/*
	 * crate::code::Code of the last departure that was not a detach; 0 if there was
	 * none.
	 */
	u64 left_because;
	/* Number of records ever written to log. */
	u64 log_written;
	/* The last crash on this CPU. */
	struct mercury_crash_record crash;
	/*
	 * 1 while KVM may use SVM above the hypervisor, else 0; written by the driver.
	 * At 0 the system sees the hypervisor's own SVME in EFER, and the CPU is
	 * detached when the system clears it.
	 */
	u32 kvm_may;
	/* Zero. */
	u32 reserved0;
	/*
	 * Pages that are read-only beneath this CPU, while it is attached: the number
	 * that crate::gate::IntegrityCall::Begin gave them, READ_ONLY_NONE or
	 * READ_ONLY_LATER. From an attach to the next crate::gate::IntegrityCall::Enter
	 * it is READ_ONLY_NONE, even if they are.
	 */
	u64 read_only;
	/* Padding to the second page, zeros. */
	u32 reserved[862];
	/* The log ring; record n (from 1) is at index (n - 1) % LOG_RECORDS. */
	struct mercury_log_record log[64];
};

static_assert(sizeof(struct mercury_shared_cpu) == 8192);
static_assert(offsetof(struct mercury_shared_cpu, magic) == 0);
static_assert(offsetof(struct mercury_shared_cpu, cpu) == 8);
static_assert(offsetof(struct mercury_shared_cpu, attached) == 12);
static_assert(offsetof(struct mercury_shared_cpu, exits) == 16);
static_assert(offsetof(struct mercury_shared_cpu, exit_ticks) == 208);
static_assert(offsetof(struct mercury_shared_cpu, attaches) == 216);
static_assert(offsetof(struct mercury_shared_cpu, detaches) == 224);
static_assert(offsetof(struct mercury_shared_cpu, left_because) == 232);
static_assert(offsetof(struct mercury_shared_cpu, log_written) == 240);
static_assert(offsetof(struct mercury_shared_cpu, crash) == 248);
static_assert(offsetof(struct mercury_shared_cpu, kvm_may) == 632);
static_assert(offsetof(struct mercury_shared_cpu, reserved0) == 636);
static_assert(offsetof(struct mercury_shared_cpu, read_only) == 640);
static_assert(offsetof(struct mercury_shared_cpu, reserved) == 648);
static_assert(offsetof(struct mercury_shared_cpu, log) == 4096);

/*
 * Header of the hypervisor's flat image. Offsets are in bytes from the image's start.
 * Text, read-only data and data each start at a page boundary.
 */
struct mercury_image_header {
	/* IMAGE_MAGIC; the driver refuses another value. */
	u64 magic;
	/* crate::MERCURY_ABI_VERSION of the hypervisor's build. */
	u32 abi_version;
	/* 1 if the image was built with fault points, else 0. */
	u32 fault_injection;
	/*
	 * Offset of the end of text (readable and executable). Text starts at 0, with
	 * this header.
	 */
	u64 text_end;
	/* Offset of the end of read-only data, which starts at text_end. */
	u64 rodata_end;
	/* Offset of the end of initialised data in the file. */
	u64 file_end;
	/* Offset of the end of the image in memory, zero-filled data included. */
	u64 memory_end;
	/*
	 * Offset of the table of relocations (ELF64 Rela). Only R_X86_64_RELATIVE
	 * occurs.
	 */
	u64 rela_offset;
	/* Size of the table of relocations in bytes. */
	u64 rela_size;
	/*
	 * Offsets of the native entry points, by Vendor; 0 if the image has no code for
	 * that vendor.
	 */
	u64 entry_offsets[2];
	/* The hypervisor's version, NUL-padded ASCII. */
	u8 version[32];
};

static_assert(sizeof(struct mercury_image_header) == 112);
static_assert(offsetof(struct mercury_image_header, magic) == 0);
static_assert(offsetof(struct mercury_image_header, abi_version) == 8);
static_assert(offsetof(struct mercury_image_header, fault_injection) == 12);
static_assert(offsetof(struct mercury_image_header, text_end) == 16);
static_assert(offsetof(struct mercury_image_header, rodata_end) == 24);
static_assert(offsetof(struct mercury_image_header, file_end) == 32);
static_assert(offsetof(struct mercury_image_header, memory_end) == 40);
static_assert(offsetof(struct mercury_image_header, rela_offset) == 48);
static_assert(offsetof(struct mercury_image_header, rela_size) == 56);
static_assert(offsetof(struct mercury_image_header, entry_offsets) == 64);
static_assert(offsetof(struct mercury_image_header, version) == 80);

/*
 * A physically contiguous range of the hypervisor's memory. Its own tables map the
 * range; the nested tables hide it.
 */
struct mercury_owned_range {
	/* Host-physical address of the first byte, page-aligned. */
	u64 start_phys;
	/* Length in pages of 4 KiB. */
	u64 pages;
};

static_assert(sizeof(struct mercury_owned_range) == 16);
static_assert(offsetof(struct mercury_owned_range, start_phys) == 0);
static_assert(offsetof(struct mercury_owned_range, pages) == 8);

/* Argument of NativeOp::Init: everything that stays the same until unload. */
struct mercury_boot_info {
	/* crate::MERCURY_ABI_VERSION of the driver's build. */
	u32 abi_version;
	/* 1 if the kernel runs with five-level paging (CR4.LA57), else 0. */
	u32 five_level;
	/* Kernel virtual address of physical address 0: the base of the direct map. */
	u64 direct_map_virt;
	/* Kernel virtual address of the image's first byte. */
	u64 image_virt;
	/*
	 * Kernel virtual address of an array of OwnedRange: all memory that the nested
	 * tables hide.
	 */
	u64 owned_virt;
	/* Number of entries at owned_virt. */
	u64 owned_count;
	/*
	 * Kernel virtual address of an array of host-physical addresses: zeroed pages
	 * for nested tables, inside owned ranges. The driver may extend the array
	 * between two calls of NativeOp::Build.
	 */
	u64 pool_virt;
	/* Number of entries at pool_virt. */
	u64 pool_count;
	/*
	 * Host-physical address behind the last byte that RAM or a device occupies.
	 * NativeOp::Build maps all memory below.
	 */
	u64 iomem_end_phys;
};

static_assert(sizeof(struct mercury_boot_info) == 64);
static_assert(offsetof(struct mercury_boot_info, abi_version) == 0);
static_assert(offsetof(struct mercury_boot_info, five_level) == 4);
static_assert(offsetof(struct mercury_boot_info, direct_map_virt) == 8);
static_assert(offsetof(struct mercury_boot_info, image_virt) == 16);
static_assert(offsetof(struct mercury_boot_info, owned_virt) == 24);
static_assert(offsetof(struct mercury_boot_info, owned_count) == 32);
static_assert(offsetof(struct mercury_boot_info, pool_virt) == 40);
static_assert(offsetof(struct mercury_boot_info, pool_count) == 48);
static_assert(offsetof(struct mercury_boot_info, iomem_end_phys) == 56);

/*
 * A segment register with its hidden part, as the driver reads it from the live
 * descriptor tables. The layout is that of AMD's control block (APM volume 2, appendix
 * B, "VMCB state save area").
 */
struct mercury_segment {
	/* Selector, as software loads it. */
	u16 selector;
	/*
	 * Access rights as the vendor's control block holds them: type, S, DPL, P in
	 * bits 7:0; AVL, L, D/B, G in bits 11:8 on AMD, in bits 15:12 on Intel. Zero
	 * for a null selector.
	 */
	u16 attributes;
	/* Limit in bytes, as LSL returns it. */
	u32 limit;
	/* Base address, virtual. */
	u64 base;
};

static_assert(sizeof(struct mercury_segment) == 16);
static_assert(offsetof(struct mercury_segment, selector) == 0);
static_assert(offsetof(struct mercury_segment, attributes) == 2);
static_assert(offsetof(struct mercury_segment, limit) == 4);
static_assert(offsetof(struct mercury_segment, base) == 8);

/* A pseudo-descriptor in memory. LGDT and LIDT get the address of limit. */
struct mercury_descriptor_table {
	/* Zeros, which align base_virt to 8 bytes. */
	u16 padding[3];
	/* Size of the table in bytes less one. */
	u16 limit;
	/* Linear address of the table: kernel virtual. */
	u64 base_virt;
};

static_assert(sizeof(struct mercury_descriptor_table) == 16);
static_assert(offsetof(struct mercury_descriptor_table, padding) == 0);
static_assert(offsetof(struct mercury_descriptor_table, limit) == 6);
static_assert(offsetof(struct mercury_descriptor_table, base_virt) == 8);

/*
 * State of the CPU at the entry of the gate: values that the driver and the gate's way
 * in store for the hypervisor.
 */
struct mercury_inward {
	/* RSP at the return label: kernel virtual. */
	u64 rsp;
	/* Kernel virtual address of the return label. */
	u64 rip;
	/* RFLAGS at the return label. */
	u64 rflags;
	/* CR3 of the system: host-physical root and flags. */
	u64 cr3;
	/* CR4 of the system at the gate's entry. */
	u64 cr4;
	/* EFER as it was before the driver set SVME for the gate (AMD). */
	u64 efer;
	/* VM_HSAVE_PA as it was before; a detach restores it (AMD). Host-physical. */
	u64 vm_hsave_pa;
	/* CS of the system. Filled by the driver. */
	struct mercury_segment cs;
	/* SS of the system. Filled by the driver. */
	struct mercury_segment ss;
	/* DS of the system. Filled by the driver. */
	struct mercury_segment ds;
	/* ES of the system. Filled by the driver. */
	struct mercury_segment es;
	/* FS, without its base. Filled by the driver on Intel. */
	struct mercury_segment fs;
	/* GS, without its base. Filled by the driver on Intel. */
	struct mercury_segment gs;
	/* LDTR, without its base. Filled by the driver on Intel. */
	struct mercury_segment ldtr;
	/* TR, without its base. Filled by the driver on Intel. */
	struct mercury_segment tr;
	/* Base of LDTR, kernel virtual; 0 for a null selector. */
	u64 ldtr_base_virt;
	/* Base of TR, kernel virtual: the task-state segment. */
	u64 tr_base_virt;
	/*
	 * GDTR of the system. Filled by the gate on Intel; on AMD the hypervisor reads
	 * it itself.
	 */
	struct mercury_descriptor_table gdtr;
	/* IDTR of the system, filled as gdtr is. */
	struct mercury_descriptor_table idtr;
};

static_assert(sizeof(struct mercury_inward) == 232);
static_assert(offsetof(struct mercury_inward, rsp) == 0);
static_assert(offsetof(struct mercury_inward, rip) == 8);
static_assert(offsetof(struct mercury_inward, rflags) == 16);
static_assert(offsetof(struct mercury_inward, cr3) == 24);
static_assert(offsetof(struct mercury_inward, cr4) == 32);
static_assert(offsetof(struct mercury_inward, efer) == 40);
static_assert(offsetof(struct mercury_inward, vm_hsave_pa) == 48);
static_assert(offsetof(struct mercury_inward, cs) == 56);
static_assert(offsetof(struct mercury_inward, ss) == 72);
static_assert(offsetof(struct mercury_inward, ds) == 88);
static_assert(offsetof(struct mercury_inward, es) == 104);
static_assert(offsetof(struct mercury_inward, fs) == 120);
static_assert(offsetof(struct mercury_inward, gs) == 136);
static_assert(offsetof(struct mercury_inward, ldtr) == 152);
static_assert(offsetof(struct mercury_inward, tr) == 168);
static_assert(offsetof(struct mercury_inward, ldtr_base_virt) == 184);
static_assert(offsetof(struct mercury_inward, tr_base_virt) == 192);
static_assert(offsetof(struct mercury_inward, gdtr) == 200);
static_assert(offsetof(struct mercury_inward, idtr) == 216);

/*
 * State of the CPU after the gate's way out: values that the way out loads into the
 * processor.
 */
struct mercury_outward {
	/* CR0 of the system. */
	u64 cr0;
	/* CR2 of the system: linear address of its last page fault. */
	u64 cr2;
	/* CR3 of the system: host-physical root and flags. */
	u64 cr3;
	/* CR4 of the system. */
	u64 cr4;
	/* DR6 of the system: status of debug exceptions. */
	u64 dr6;
	/* DR7 of the system: armed breakpoints. */
	u64 dr7;
	/*
	 * GDTR of the system, as LGDT reads it from memory: the limit in the two bytes
	 * before the address.
	 */
	struct mercury_descriptor_table gdtr;
	/* IDTR of the system, as LIDT reads it from memory. */
	struct mercury_descriptor_table idtr;
	/*
	 * IA32_DEBUGCTL where only the gate can load it: with branches stored through
	 * the page tables in use (Intel). 0 if the gate need not.
	 */
	u64 debugctl;
	/* Selectors ES, CS, SS and DS, in this order. */
	u64 selectors[4];
	/* Virtual address at which the system goes on. */
	u64 rip;
	/* RFLAGS with which the system goes on. */
	u64 rflags;
	/* General registers of the system; entry 4 is RSP. */
	u64 registers[16];
	/*
	 * Selectors FS and GS (Intel). On AMD the hypervisor loads them before the
	 * gate.
	 */
	u64 thread_selectors[2];
	/* Bases of FS and GS, virtual (Intel). */
	u64 thread_bases[2];
	/*
	 * EFER where only the gate can load it: without NXE, which the hypervisor's
	 * tables need (Intel). 0 if the gate need not.
	 */
	u64 efer;
	/* Bits of SVM that the gate leaves alone (AMD): KEEP_SVME, KEEP_GIF_CLEAR. */
	u64 svm;
};

static_assert(sizeof(struct mercury_outward) == 312);
static_assert(offsetof(struct mercury_outward, cr0) == 0);
static_assert(offsetof(struct mercury_outward, cr2) == 8);
static_assert(offsetof(struct mercury_outward, cr3) == 16);
static_assert(offsetof(struct mercury_outward, cr4) == 24);
static_assert(offsetof(struct mercury_outward, dr6) == 32);
static_assert(offsetof(struct mercury_outward, dr7) == 40);
static_assert(offsetof(struct mercury_outward, gdtr) == 48);
static_assert(offsetof(struct mercury_outward, idtr) == 64);
static_assert(offsetof(struct mercury_outward, debugctl) == 80);
static_assert(offsetof(struct mercury_outward, selectors) == 88);
static_assert(offsetof(struct mercury_outward, rip) == 120);
static_assert(offsetof(struct mercury_outward, rflags) == 128);
static_assert(offsetof(struct mercury_outward, registers) == 136);
static_assert(offsetof(struct mercury_outward, thread_selectors) == 264);
static_assert(offsetof(struct mercury_outward, thread_bases) == 280);
static_assert(offsetof(struct mercury_outward, efer) == 296);
static_assert(offsetof(struct mercury_outward, svm) == 304);

/*
 * Delivery of NMIs on a processor without a global interrupt flag. An NMI may strike
 * between the gate's first instruction and its last, or in the hypervisor. The
 * processor then calls the driver's handler in the gate page (NmiBlock::handler_virt),
 * on whatever stack of the area is in use. The handler counts the NMI in
 * NmiBlock::pending and returns without IRET, so that further NMIs stay blocked, as
 * they would be in the system's own handler. A second NMI waits in the processor. The
 * next entry into the guest injects the first; the gate's way out raises it with INT 2
 * after the system's tables are loaded. The last read of pending and the entry are a
 * window: window_start_virt up to window_end_virt. If an NMI strikes in the window, the
 * handler returns to restart_virt, where the hypervisor reads pending again.
 */
struct mercury_nmi_block {
	/* Number of NMIs that the system has yet to receive. */
	u64 pending;
	/*
	 * Virtual address of the handler; 0 on a processor that needs none. Filled at
	 * load.
	 */
	u64 handler_virt;
	/*
	 * Host-virtual address of the window's first instruction. Filled by the
	 * hypervisor.
	 */
	u64 window_start_virt;
	/* Host-virtual address behind the window's last instruction. */
	u64 window_end_virt;
	/* Host-virtual address of the code that reads pending again. */
	u64 restart_virt;
	/*
	 * GDT while the gate or the hypervisor runs: null, unused, then code and data
	 * at the kernel's selectors. Filled at load.
	 */
	u64 gdt[4];
	/*
	 * IDT while the gate or the hypervisor runs: vectors 0 to 2, of which only NMI
	 * is present. Filled at load.
	 */
	u64 idt[6];
	/* Pseudo-descriptor of gdt. Filled at load. */
	struct mercury_descriptor_table gdtr;
	/* Pseudo-descriptor of idt. Filled at load. */
	struct mercury_descriptor_table idtr;
};

static_assert(sizeof(struct mercury_nmi_block) == 152);
static_assert(offsetof(struct mercury_nmi_block, pending) == 0);
static_assert(offsetof(struct mercury_nmi_block, handler_virt) == 8);
static_assert(offsetof(struct mercury_nmi_block, window_start_virt) == 16);
static_assert(offsetof(struct mercury_nmi_block, window_end_virt) == 24);
static_assert(offsetof(struct mercury_nmi_block, restart_virt) == 32);
static_assert(offsetof(struct mercury_nmi_block, gdt) == 40);
static_assert(offsetof(struct mercury_nmi_block, idt) == 72);
static_assert(offsetof(struct mercury_nmi_block, gdtr) == 120);
static_assert(offsetof(struct mercury_nmi_block, idtr) == 136);

/*
 * An armed fault point. The driver keeps it and hands it to the hypervisor in a CPU's
 * area.
 */
struct mercury_fault_arm {
	/* FaultPoint as a number; 0: none. */
	u32 point;
	/* Number of passages until the point fires; each passage counts it down by one. */
	u32 passage;
	/*
	 * For FaultPoint::Facts: byte offset of an aligned 32-bit word in
	 * crate::facts::CpuFacts. For FaultPoint::RunField: the word and the shift
	 * described there.
	 */
	u32 offset;
	/*
	 * For FaultPoint::Facts: the new value of the word. For FaultPoint::RunField:
	 * the bits to be flipped.
	 */
	u32 value;
};

static_assert(sizeof(struct mercury_fault_arm) == 16);
static_assert(offsetof(struct mercury_fault_arm, point) == 0);
static_assert(offsetof(struct mercury_fault_arm, passage) == 4);
static_assert(offsetof(struct mercury_fault_arm, offset) == 8);
static_assert(offsetof(struct mercury_fault_arm, value) == 12);

/*
 * The first bytes of a CPU's area. The hypervisor's private per-CPU data follows at
 * GATE_PRIVATE_OFFSET.
 */
struct mercury_gate_block {
	/* CR3 of the hypervisor's tables: a host-physical address. Filled at load. */
	u64 host_cr3;
	/*
	 * CR4 while the hypervisor runs. Only PAE, MCE, OSFXSR and OSXMMEXCPT are set,
	 * LA57 if the kernel has it, and VMXE on Intel. Filled at load.
	 */
	u64 host_cr4;
	/* Host-virtual address of the native entry point. Filled at load. */
	u64 entry_virt;
	/* Virtual address of the gate's way out. Filled at load. */
	u64 leave_virt;
	/* Host-physical address of this area. Filled at load. */
	u64 area_phys;
	/* Virtual address of this CPU's crate::shared::SharedCpu. Filled at load. */
	u64 shared_virt;
	/*
	 * Host-virtual address of the page through which the hypervisor reads a guest's
	 * control block of KVM. Filled at load.
	 */
	u64 window_virt;
	/*
	 * Host-virtual address of the page-table entry that maps that page. Filled at
	 * load.
	 */
	u64 window_entry_virt;
	/* Linux's number of this CPU. Filled at load. */
	u32 cpu;
	/* NativeOp to execute. Filled by the driver before each call. */
	u32 operation;
	/* Argument of the operation: a kernel virtual address, or 0. */
	u64 argument;
	/* Out: the two values to which the result code's explanation refers. */
	u64 detail[2];
	/* Armed fault point of this CPU (fault-injection builds). */
	struct mercury_fault_arm fault;
	/*
	 * Number of fault points that have fired on this CPU since load
	 * (fault-injection builds).
	 */
	u64 fault_fired;
	/* State that the way in leaves for the hypervisor. */
	struct mercury_inward inward;
	/* State that the way out loads. */
	struct mercury_outward outward;
	/*
	 * Space for the gate alone: RIP, CS, RFLAGS, RSP and SS for the IRETQ of a way
	 * out to user mode.
	 */
	u64 frame[5];
	/*
	 * 1 if a machine check struck in the hypervisor and the system has not received
	 * it yet; else 0. The gate raises the machine check on the way out.
	 */
	u64 machine_check;
	/* Delivery of NMIs where the processor cannot hold them back (Intel). */
	struct mercury_nmi_block nmi;
};

static_assert(sizeof(struct mercury_gate_block) == 864);
static_assert(offsetof(struct mercury_gate_block, host_cr3) == 0);
static_assert(offsetof(struct mercury_gate_block, host_cr4) == 8);
static_assert(offsetof(struct mercury_gate_block, entry_virt) == 16);
static_assert(offsetof(struct mercury_gate_block, leave_virt) == 24);
static_assert(offsetof(struct mercury_gate_block, area_phys) == 32);
static_assert(offsetof(struct mercury_gate_block, shared_virt) == 40);
static_assert(offsetof(struct mercury_gate_block, window_virt) == 48);
static_assert(offsetof(struct mercury_gate_block, window_entry_virt) == 56);
static_assert(offsetof(struct mercury_gate_block, cpu) == 64);
static_assert(offsetof(struct mercury_gate_block, operation) == 68);
static_assert(offsetof(struct mercury_gate_block, argument) == 72);
static_assert(offsetof(struct mercury_gate_block, detail) == 80);
static_assert(offsetof(struct mercury_gate_block, fault) == 96);
static_assert(offsetof(struct mercury_gate_block, fault_fired) == 112);
static_assert(offsetof(struct mercury_gate_block, inward) == 120);
static_assert(offsetof(struct mercury_gate_block, outward) == 352);
static_assert(offsetof(struct mercury_gate_block, frame) == 664);
static_assert(offsetof(struct mercury_gate_block, machine_check) == 704);
static_assert(offsetof(struct mercury_gate_block, nmi) == 712);

/* The report of the last rollback. */
struct mercury_rollback_report {
	/* Number of rollbacks since load. */
	u64 count;
	/* RollbackReason of the last rollback. */
	u32 reason;
	/* Linux's number of the CPU that asked for it. */
	u32 cpu;
	/* RIP of the system on that CPU: kernel virtual. */
	u64 rip_virt;
	/* Number of pages that were put back. */
	u64 pages;
	/* Number of PCI functions that were silenced. */
	u64 functions;
	/* TSC ticks from the request until the rendezvous of all CPUs. */
	u64 rendezvous_ticks;
	/* TSC ticks from the rendezvous until all memory was in place. */
	u64 work_ticks;
	/*
	 * Number of pages compared with their content at the instant (fault-injection
	 * builds only).
	 */
	u64 compared;
	/* Number of those pages that differed. */
	u64 different;
	/* Guest-physical address of the first page that differed. */
	u64 different_phys;
	/* TSC ticks of the life that ended, from the instant or the rollback before. */
	u64 lived_ticks;
	/*
	 * hash of the hashes of all pages in the life that ended, in their order
	 * (fault-injection builds only).
	 */
	u64 dead_hash;
	/*
	 * Number of deaths in a row of the same cause, the last one included. 0: the
	 * machine went back on command.
	 */
	u64 same;
};

static_assert(sizeof(struct mercury_rollback_report) == 104);
static_assert(offsetof(struct mercury_rollback_report, count) == 0);
static_assert(offsetof(struct mercury_rollback_report, reason) == 8);
static_assert(offsetof(struct mercury_rollback_report, cpu) == 12);
static_assert(offsetof(struct mercury_rollback_report, rip_virt) == 16);
static_assert(offsetof(struct mercury_rollback_report, pages) == 24);
static_assert(offsetof(struct mercury_rollback_report, functions) == 32);
static_assert(offsetof(struct mercury_rollback_report, rendezvous_ticks) == 40);
static_assert(offsetof(struct mercury_rollback_report, work_ticks) == 48);
static_assert(offsetof(struct mercury_rollback_report, compared) == 56);
static_assert(offsetof(struct mercury_rollback_report, different) == 64);
static_assert(offsetof(struct mercury_rollback_report, different_phys) == 72);
static_assert(offsetof(struct mercury_rollback_report, lived_ticks) == 80);
static_assert(offsetof(struct mercury_rollback_report, dead_hash) == 88);
static_assert(offsetof(struct mercury_rollback_report, same) == 96);

/* Pages for the pool, or pages from it. */
struct mercury_page_list {
	/* Number of entries in use, at most PAGE_LIST_MAX. */
	u64 count;
	/* Host-physical addresses of the pages, page-aligned. */
	u64 pages_phys[511];
};

static_assert(sizeof(struct mercury_page_list) == 4096);
static_assert(offsetof(struct mercury_page_list, count) == 0);
static_assert(offsetof(struct mercury_page_list, pages_phys) == 8);

/* The memory and the CPUs of a snapshot. */
struct mercury_snapshot_setup {
	/*
	 * Virtual address of an array of crate::gate::OwnedRange, ascending: the memory
	 * to keep. The array stays until the end.
	 */
	u64 memory_virt;
	/* Number of entries at memory_virt. */
	u64 memory_count;
	/*
	 * Virtual address of an array of virtual addresses of bitmaps, of MAP_BITS
	 * each, with a bit for each kept page, in their order. A set bit: the page is
	 * persistent DMA memory, and is copied at the instant. 0: no such pages.
	 */
	u64 persistent_virt;
	/*
	 * Virtual address of an array of free_count virtual addresses of bitmaps, of
	 * MAP_BITS each, with a bit for each page of the address space. An address of 0
	 * stands for a bitmap of zeros. A set bit: the page was free at the instant,
	 * its content does not matter, and it is read as zeros.
	 */
	u64 free_virt;
	/* Number of entries at free_virt. */
	u64 free_count;
	/*
	 * Virtual address of an array of one hash for each kept page, in their order.
	 * The hypervisor fills it at the instant; 0: none (fault-injection builds
	 * only).
	 */
	u64 hashes_virt;
	/* Number of CPUs that will enter. */
	u32 cpus;
	/* 1 to keep a dirty log from the instant on, else 0. */
	u32 log;
	/* 1 if the machine goes back once only, else 0. */
	u32 once;
	/* Reserved; zero. */
	u32 reserved;
	/*
	 * Virtual address of an array of crate::restart::RestartCpu, one for each of
	 * these CPUs; the array stays until the end. Not 0: the snapshot is kept for a
	 * rollback. 0: its frames are read.
	 */
	u64 keep_virt;
	/* TSC ticks that devices get to finish before memory is put back. */
	u64 settle_ticks;
	/*
	 * Bit mask of the PCI buses, 0 to 255, whose devices are silenced at a
	 * rollback.
	 */
	u64 buses[4];
	/*
	 * Virtual address of an array of EndedCpu, one for each CPU at keep_virt; the
	 * array stays until the end. 0: none.
	 */
	u64 ended_virt;
	/*
	 * TSC ticks in which the machine goes back no more than twice from the same
	 * death.
	 */
	u64 repeat_ticks;
};

static_assert(sizeof(struct mercury_snapshot_setup) == 128);
static_assert(offsetof(struct mercury_snapshot_setup, memory_virt) == 0);
static_assert(offsetof(struct mercury_snapshot_setup, memory_count) == 8);
static_assert(offsetof(struct mercury_snapshot_setup, persistent_virt) == 16);
static_assert(offsetof(struct mercury_snapshot_setup, free_virt) == 24);
static_assert(offsetof(struct mercury_snapshot_setup, free_count) == 32);
static_assert(offsetof(struct mercury_snapshot_setup, hashes_virt) == 40);
static_assert(offsetof(struct mercury_snapshot_setup, cpus) == 48);
static_assert(offsetof(struct mercury_snapshot_setup, log) == 52);
static_assert(offsetof(struct mercury_snapshot_setup, once) == 56);
static_assert(offsetof(struct mercury_snapshot_setup, reserved) == 60);
static_assert(offsetof(struct mercury_snapshot_setup, keep_virt) == 64);
static_assert(offsetof(struct mercury_snapshot_setup, settle_ticks) == 72);
static_assert(offsetof(struct mercury_snapshot_setup, buses) == 80);
static_assert(offsetof(struct mercury_snapshot_setup, ended_virt) == 112);
static_assert(offsetof(struct mercury_snapshot_setup, repeat_ticks) == 120);

/*
 * State of a CPU when the machine was put back: the end of a life. The hypervisor fills
 * all but the first fields.
 */
struct mercury_ended_cpu {
	/* Linux's number of this CPU. */
	u32 cpu;
	/* Reserved; zero. */
	u32 reserved;
	/* Kernel virtual address of this CPU's pointer to its task. */
	u64 task_virt;
	/*
	 * General registers, in the processor's order: RAX, RCX, RDX, RBX, RSP, RBP,
	 * RSI, RDI, R8 to R15.
	 */
	u64 registers[16];
	/* RIP of the system on this CPU. */
	u64 rip;
	/* RFLAGS of the system. */
	u64 rflags;
	/* CR2 of the system: its last page fault. */
	u64 cr2;
	/* CR3 of the system: root of its tables. */
	u64 cr3;
	/* Selector in CS of the system. */
	u64 cs;
	/* Selector in SS of the system. */
	u64 ss;
};

static_assert(sizeof(struct mercury_ended_cpu) == 192);
static_assert(offsetof(struct mercury_ended_cpu, cpu) == 0);
static_assert(offsetof(struct mercury_ended_cpu, reserved) == 4);
static_assert(offsetof(struct mercury_ended_cpu, task_virt) == 8);
static_assert(offsetof(struct mercury_ended_cpu, registers) == 16);
static_assert(offsetof(struct mercury_ended_cpu, rip) == 144);
static_assert(offsetof(struct mercury_ended_cpu, rflags) == 152);
static_assert(offsetof(struct mercury_ended_cpu, cr2) == 160);
static_assert(offsetof(struct mercury_ended_cpu, cr3) == 168);
static_assert(offsetof(struct mercury_ended_cpu, cs) == 176);
static_assert(offsetof(struct mercury_ended_cpu, ss) == 184);

/*
 * The dirty log of the writes of CPUs before a snapshot's instant. The log of a CPU
 * ends when the CPU enters the snapshot.
 */
struct mercury_log_setup {
	/*
	 * Virtual address of the ranges, as SnapshotSetup::memory_virt; the snapshot
	 * must have the same.
	 */
	u64 memory_virt;
	/* Number of entries at memory_virt. */
	u64 memory_count;
	/*
	 * Virtual address of an array of map_count virtual addresses of bitmaps, as
	 * SnapshotSetup::free_virt. A set bit: the page may have been written since the
	 * last collection. Driver and hypervisor set bits by locked instructions.
	 */
	u64 written_virt;
	/*
	 * Virtual address of a second such array, with bitmaps in the same places. A
	 * set bit: the page is collected. The hypervisor only sets bits.
	 */
	u64 collected_virt;
	/* Number of entries at written_virt and at collected_virt. */
	u64 map_count;
};

static_assert(sizeof(struct mercury_log_setup) == 40);
static_assert(offsetof(struct mercury_log_setup, memory_virt) == 0);
static_assert(offsetof(struct mercury_log_setup, memory_count) == 8);
static_assert(offsetof(struct mercury_log_setup, written_virt) == 16);
static_assert(offsetof(struct mercury_log_setup, collected_virt) == 24);
static_assert(offsetof(struct mercury_log_setup, map_count) == 32);

/* The progress of a collection of the dirty log. */
struct mercury_log_collect {
	/*
	 * In: guest-physical address at which to begin. Out: address at which to
	 * continue; all ones after the last frame.
	 */
	u64 next_phys;
	/* Out: number of frames that were moved, added to the value on entry. */
	u64 pages;
};

static_assert(sizeof(struct mercury_log_collect) == 16);
static_assert(offsetof(struct mercury_log_collect, next_phys) == 0);
static_assert(offsetof(struct mercury_log_collect, pages) == 8);

/* One frame to be read. */
struct mercury_read_entry {
	/* Guest-physical address of the frame, page-aligned. */
	u64 frame_phys;
	/*
	 * Host-physical address of the page that receives the content. The page must
	 * not be kept memory.
	 */
	u64 to_phys;
};

static_assert(sizeof(struct mercury_read_entry) == 16);
static_assert(offsetof(struct mercury_read_entry, frame_phys) == 0);
static_assert(offsetof(struct mercury_read_entry, to_phys) == 8);

/* Frames to be read, best in ascending order. */
struct mercury_read_list {
	/* Number of entries in use, at most READ_LIST_MAX. */
	u32 count;
	/* Reserved; zero on both sides. */
	u32 reserved;
	/*
	 * Written by the hypervisor: bit n is set if the frame of entry n had been read
	 * before.
	 */
	u64 read_before;
	/* The frames, and the pages that receive their content. */
	struct mercury_read_entry entries[16];
};

static_assert(sizeof(struct mercury_read_list) == 272);
static_assert(offsetof(struct mercury_read_list, count) == 0);
static_assert(offsetof(struct mercury_read_list, reserved) == 4);
static_assert(offsetof(struct mercury_read_list, read_before) == 8);
static_assert(offsetof(struct mercury_read_list, entries) == 16);

/* The state and the cost of a snapshot. */
struct mercury_snapshot_status {
	/* 1 while there is a snapshot, else 0. */
	u32 live;
	/*
	 * 1 if the snapshot holds the complete memory of the instant; 0 if it is
	 * invalid.
	 */
	u32 exact;
	/* Number of free pages in the pool. */
	u64 free_pages;
	/* Number of copies that the pool holds. */
	u64 copies;
	/* Number of copies made since the begin. */
	u64 copied;
	/* Number of frames read since the begin. */
	u64 taken;
	/*
	 * crate::code::Code that tells why the snapshot is invalid; 0 while it is
	 * exact.
	 */
	u32 invalid_because;
	/* 1 if the snapshot is kept for a rollback, else 0. */
	u32 kept;
	/*
	 * 1 if the memory of the life that ended last is known: see
	 * SnapshotCall::ReadDead.
	 */
	u32 dead;
	/* Reserved; zero. */
	u32 reserved;
	/* Number of pages of the pool that hold memory of that life. */
	u64 dead_pages;
	/*
	 * Number of pages copied at the instant, or after the last rollback: persistent
	 * DMA memory.
	 */
	u64 persistent_pages;
	/* TSC ticks that copying them took. */
	u64 persistent_ticks;
	/*
	 * TSC ticks of the instant in the hypervisor, on the CPU that came last. They
	 * include persistent_ticks.
	 */
	u64 enter_ticks;
	/* Number of SnapshotCall::Read calls that reported a low pool. */
	u64 hurries;
	/* Number of times that a writer waited for free pool pages. */
	u64 waits;
	/* Report of this machine's last rollback. */
	struct mercury_rollback_report rollback;
};

static_assert(sizeof(struct mercury_snapshot_status) == 208);
static_assert(offsetof(struct mercury_snapshot_status, live) == 0);
static_assert(offsetof(struct mercury_snapshot_status, exact) == 4);
static_assert(offsetof(struct mercury_snapshot_status, free_pages) == 8);
static_assert(offsetof(struct mercury_snapshot_status, copies) == 16);
static_assert(offsetof(struct mercury_snapshot_status, copied) == 24);
static_assert(offsetof(struct mercury_snapshot_status, taken) == 32);
static_assert(offsetof(struct mercury_snapshot_status, invalid_because) == 40);
static_assert(offsetof(struct mercury_snapshot_status, kept) == 44);
static_assert(offsetof(struct mercury_snapshot_status, dead) == 48);
static_assert(offsetof(struct mercury_snapshot_status, reserved) == 52);
static_assert(offsetof(struct mercury_snapshot_status, dead_pages) == 56);
static_assert(offsetof(struct mercury_snapshot_status, persistent_pages) == 64);
static_assert(offsetof(struct mercury_snapshot_status, persistent_ticks) == 72);
static_assert(offsetof(struct mercury_snapshot_status, enter_ticks) == 80);
static_assert(offsetof(struct mercury_snapshot_status, hurries) == 88);
static_assert(offsetof(struct mercury_snapshot_status, waits) == 96);
static_assert(offsetof(struct mercury_snapshot_status, rollback) == 104);

/*
 * Durations of the instant's steps in TSC ticks, one step after the other, on the CPU
 * that leads.
 */
struct mercury_instant_ticks {
	/* Step until tasks are frozen and devices are quiesced. */
	u64 quiesce;
	/* Step until all CPUs stand still, with interrupts off. */
	u64 gather;
	/* Step until the core of the system is suspended. */
	u64 suspend;
	/*
	 * Step until all CPUs have searched for persistent DMA memory and for free
	 * pages.
	 */
	u64 search;
	/* Step until the state of this CPU is saved. */
	u64 save;
	/*
	 * Step until this CPU is back from the hypervisor and has written for the first
	 * time.
	 */
	u64 enter;
	/* Step until the core of the system goes on. */
	u64 resume;
	/* Step until all CPUs go on. */
	u64 release;
	/* Step until devices and tasks go on. */
	u64 thaw;
};

static_assert(sizeof(struct mercury_instant_ticks) == 72);
static_assert(offsetof(struct mercury_instant_ticks, quiesce) == 0);
static_assert(offsetof(struct mercury_instant_ticks, gather) == 8);
static_assert(offsetof(struct mercury_instant_ticks, suspend) == 16);
static_assert(offsetof(struct mercury_instant_ticks, search) == 24);
static_assert(offsetof(struct mercury_instant_ticks, save) == 32);
static_assert(offsetof(struct mercury_instant_ticks, enter) == 40);
static_assert(offsetof(struct mercury_instant_ticks, resume) == 48);
static_assert(offsetof(struct mercury_instant_ticks, release) == 56);
static_assert(offsetof(struct mercury_instant_ticks, thaw) == 64);

/*
 * The registers that a CPU needs before C code can restore the rest. Offsets are for
 * assembler.
 */
struct mercury_saved_cpu {
	/* Kernel virtual address of this structure, in the system of the image. */
	u64 virt;
	/* CR0 of this CPU at the instant. */
	u64 cr0;
	/* CR3 of this CPU at the instant: host-physical root and flags. */
	u64 cr3;
	/*
	 * CR4 of this CPU at the instant, without the bits that hardware virtualization
	 * sets.
	 */
	u64 cr4;
	/* Kernel virtual address at which the CPU goes on, with 1 in RAX. */
	u64 rip;
	/* RSP at that address: kernel virtual. */
	u64 rsp;
	/* RFLAGS at that address. */
	u64 rflags;
	/* Callee-saved registers: RBX, RBP, R12 to R15. */
	u64 registers[6];
	/* Base of FS, virtual. */
	u64 fs_base;
	/* Base of GS, virtual: the kernel's per-CPU base. */
	u64 gs_base;
	/* Base that SWAPGS loads into GS for user mode, virtual. */
	u64 kernel_gs_base;
	/* GDTR of this CPU at the instant. */
	struct mercury_descriptor_table gdtr;
	/* IDTR of this CPU at the instant. */
	struct mercury_descriptor_table idtr;
	/* Selectors DS and ES, in this order. */
	u64 data_selectors[2];
	/*
	 * Zeros in the image. The restore environment puts random bytes here, so that
	 * two machines from one image do not share their random numbers.
	 */
	u64 seed[4];
	/* Linux's number of the thread that ran on this CPU, for debuggers. */
	u64 thread;
};

static_assert(sizeof(struct mercury_saved_cpu) == 216);
static_assert(offsetof(struct mercury_saved_cpu, virt) == 0);
static_assert(offsetof(struct mercury_saved_cpu, cr0) == 8);
static_assert(offsetof(struct mercury_saved_cpu, cr3) == 16);
static_assert(offsetof(struct mercury_saved_cpu, cr4) == 24);
static_assert(offsetof(struct mercury_saved_cpu, rip) == 32);
static_assert(offsetof(struct mercury_saved_cpu, rsp) == 40);
static_assert(offsetof(struct mercury_saved_cpu, rflags) == 48);
static_assert(offsetof(struct mercury_saved_cpu, registers) == 56);
static_assert(offsetof(struct mercury_saved_cpu, fs_base) == 104);
static_assert(offsetof(struct mercury_saved_cpu, gs_base) == 112);
static_assert(offsetof(struct mercury_saved_cpu, kernel_gs_base) == 120);
static_assert(offsetof(struct mercury_saved_cpu, gdtr) == 128);
static_assert(offsetof(struct mercury_saved_cpu, idtr) == 144);
static_assert(offsetof(struct mercury_saved_cpu, data_selectors) == 160);
static_assert(offsetof(struct mercury_saved_cpu, seed) == 176);
static_assert(offsetof(struct mercury_saved_cpu, thread) == 208);

/*
 * The control structure of a landing. The landing code reads it at its physical
 * address: its page tables map all memory at virtual addresses equal to the physical
 * ones.
 */
struct mercury_landing {
	/* Physical address of the root of these page tables. */
	u64 root_phys;
	/* Physical address of the first LandingList of copies; 0: no copies. */
	u64 list_phys;
	/*
	 * Physical address of an array: for each CPU the physical address of its
	 * SavedCpu.
	 */
	u64 cpus_phys;
	/* Kernel virtual address of mercury_resume in the system of the image. */
	u64 resume_virt;
	/* Number of CPUs that will land. */
	u32 cpus;
	/* Number of CPUs that have landed. */
	u32 arrived;
	/* 1 after all waiting frames were copied to their destinations, else 0. */
	u32 copied;
	/* Reserved; zero on both sides. */
	u32 reserved;
};

static_assert(sizeof(struct mercury_landing) == 48);
static_assert(offsetof(struct mercury_landing, root_phys) == 0);
static_assert(offsetof(struct mercury_landing, list_phys) == 8);
static_assert(offsetof(struct mercury_landing, cpus_phys) == 16);
static_assert(offsetof(struct mercury_landing, resume_virt) == 24);
static_assert(offsetof(struct mercury_landing, cpus) == 32);
static_assert(offsetof(struct mercury_landing, arrived) == 36);
static_assert(offsetof(struct mercury_landing, copied) == 40);
static_assert(offsetof(struct mercury_landing, reserved) == 44);

/* A page of frames that the landing code has to copy. */
struct mercury_landing_list {
	/* Physical address of the next list; 0: this list is the last. */
	u64 next_phys;
	/* Number of entries in use, at most LANDING_LIST_MAX. */
	u64 count;
	/*
	 * Pairs of physical addresses: the destination frame, and the frame where its
	 * content waits. 0 as the second: the content is all zeros.
	 */
	u64 copies[510];
};

static_assert(sizeof(struct mercury_landing_list) == 4096);
static_assert(offsetof(struct mercury_landing_list, next_phys) == 0);
static_assert(offsetof(struct mercury_landing_list, count) == 8);
static_assert(offsetof(struct mercury_landing_list, copies) == 16);

/* A CPU of the machine that an image holds. */
struct mercury_restart_cpu {
	/* Linux's number of this CPU. */
	u32 cpu;
	/* Identifier of the CPU's local APIC. */
	u32 apic_id;
	/* Physical address of the CPU's SavedCpu. */
	u64 saved_phys;
};

static_assert(sizeof(struct mercury_restart_cpu) == 16);
static_assert(offsetof(struct mercury_restart_cpu, cpu) == 0);
static_assert(offsetof(struct mercury_restart_cpu, apic_id) == 4);
static_assert(offsetof(struct mercury_restart_cpu, saved_phys) == 8);

/* A range of physical memory of the machine that an image holds. */
struct mercury_restart_range {
	/* Physical address of the first byte, page-aligned. */
	u64 start_phys;
	/* Length in pages of 4 KiB. */
	u64 pages;
	/* One of MERCURY_RANGE_*. */
	u64 kind;
};

static_assert(sizeof(struct mercury_restart_range) == 24);
static_assert(offsetof(struct mercury_restart_range, start_phys) == 0);
static_assert(offsetof(struct mercury_restart_range, pages) == 8);
static_assert(offsetof(struct mercury_restart_range, kind) == 16);

/* One frame to be loaded into its destination. */
struct mercury_load_entry {
	/* Physical address of the destination frame. */
	u64 frame_phys;
	/*
	 * One of MERCURY_LOAD_*, or the physical address of a destination frame that
	 * was loaded before with the same content.
	 */
	u64 source;
};

static_assert(sizeof(struct mercury_load_entry) == 16);
static_assert(offsetof(struct mercury_load_entry, frame_phys) == 0);
static_assert(offsetof(struct mercury_load_entry, source) == 8);

/* A virtio device with the MMIO transport (virtio 1.2, 4.2 "Virtio Over MMIO"). */
struct mercury_guest_slot {
	/* Physical address of the device's registers, page-aligned. */
	u64 window_phys;
	/* Length of the registers in bytes: 4096. */
	u32 window_bytes;
	/*
	 * Global system interrupt (an input of the IOAPIC), edge-triggered, active
	 * high.
	 */
	u32 gsi;
	/* Number of the device's kind in the virtio standard, for the log. */
	u32 device;
	/* Reserved; zero on both sides. */
	u32 reserved;
};

static_assert(sizeof(struct mercury_guest_slot) == 24);
static_assert(offsetof(struct mercury_guest_slot, window_phys) == 0);
static_assert(offsetof(struct mercury_guest_slot, window_bytes) == 8);
static_assert(offsetof(struct mercury_guest_slot, gsi) == 12);
static_assert(offsetof(struct mercury_guest_slot, device) == 16);
static_assert(offsetof(struct mercury_guest_slot, reserved) == 20);

/*
 * The devices that wait for the guest. The page with it lies outside of all memory that
 * the kernel of the guest knows.
 */
struct mercury_guest_description {
	/* MERCURY_GUEST_MAGIC. */
	u64 magic;
	/* MERCURY_GUEST_VERSION. */
	u32 version;
	/* Number of slots in use, at most GUEST_SLOTS_MAX. */
	u32 count;
	/* The devices; slots from count on are zero. */
	struct mercury_guest_slot slots[16];
	/*
	 * Global system interrupt by which the monitor tells of an order, as a slot's.
	 * 0: it has none.
	 */
	u32 doorbell_gsi;
	/* Reserved; zero. */
	u32 reserved;
};

static_assert(sizeof(struct mercury_guest_description) == 408);
static_assert(offsetof(struct mercury_guest_description, magic) == 0);
static_assert(offsetof(struct mercury_guest_description, version) == 8);
static_assert(offsetof(struct mercury_guest_description, count) == 12);
static_assert(offsetof(struct mercury_guest_description, slots) == 16);
static_assert(offsetof(struct mercury_guest_description, doorbell_gsi) == 400);
static_assert(offsetof(struct mercury_guest_description, reserved) == 404);

/* The result of an operation. */
struct mercury_outcome {
	/* crate::code::Code as a number; 0 is success. */
	u32 code;
	/*
	 * Linux's number of the CPU that the code concerns; u32::MAX if it concerns no
	 * single CPU.
	 */
	u32 cpu;
	/*
	 * Values to which the code's explanation refers: the offending register, field
	 * or address.
	 */
	u64 detail[2];
};

static_assert(sizeof(struct mercury_outcome) == 24);
static_assert(offsetof(struct mercury_outcome, code) == 0);
static_assert(offsetof(struct mercury_outcome, cpu) == 4);
static_assert(offsetof(struct mercury_outcome, detail) == 8);

/* Arguments of the watch, and its state. */
struct mercury_watch_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* Reserved; must be zero. */
	u64 flags;
	/* In: bits of MERCURY_WATCH_*, 0 to stop the watch. Out: the bits in force. */
	u32 acts;
	/* Out: bits of MERCURY_WATCH_TIER_*: the sources of NMIs in use. */
	u32 tiers;
	/* Out: crate::code::Code that tells why the HPET is not used; 0 if it is. */
	u32 hpet_code;
	/*
	 * Out: crate::code::Code that tells why counters of cycles are not used; 0 if
	 * they are.
	 */
	u32 perf_code;
	/* Out: number of CPUs that are watched. */
	u32 cpus;
	/* Reserved; must be zero. */
	u32 reserved;
	/* Out: number of NMIs of the HPET since the driver was loaded. */
	u64 ticks;
	/* Out: number of hangs that were noticed. */
	u64 alarms;
	/* Out: the longest time for which a CPU has been seen frozen, in milliseconds. */
	u64 longest_ms;
	/* Out: the last alarm in words, up to the first zero byte. */
	u8 message[128];
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_watch_request) == 216);
static_assert(offsetof(struct mercury_watch_request, header) == 0);
static_assert(offsetof(struct mercury_watch_request, flags) == 8);
static_assert(offsetof(struct mercury_watch_request, acts) == 16);
static_assert(offsetof(struct mercury_watch_request, tiers) == 20);
static_assert(offsetof(struct mercury_watch_request, hpet_code) == 24);
static_assert(offsetof(struct mercury_watch_request, perf_code) == 28);
static_assert(offsetof(struct mercury_watch_request, cpus) == 32);
static_assert(offsetof(struct mercury_watch_request, reserved) == 36);
static_assert(offsetof(struct mercury_watch_request, ticks) == 40);
static_assert(offsetof(struct mercury_watch_request, alarms) == 48);
static_assert(offsetof(struct mercury_watch_request, longest_ms) == 56);
static_assert(offsetof(struct mercury_watch_request, message) == 64);
static_assert(offsetof(struct mercury_watch_request, outcome) == 192);

/* Arguments of a mend. */
struct mercury_mend_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* In: the kernel's address of the first byte, in its text or in a module's. */
	u64 address;
	/* In: number of bytes, which lie in one page. */
	u32 size;
	/* Reserved; must be zero. */
	u32 reserved;
	/* In: the bytes that have to be there. Nothing is written if others are. */
	u8 expected[32];
	/* In: the bytes to write. */
	u8 wanted[32];
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_mend_request) == 112);
static_assert(offsetof(struct mercury_mend_request, header) == 0);
static_assert(offsetof(struct mercury_mend_request, address) == 8);
static_assert(offsetof(struct mercury_mend_request, size) == 16);
static_assert(offsetof(struct mercury_mend_request, reserved) == 20);
static_assert(offsetof(struct mercury_mend_request, expected) == 24);
static_assert(offsetof(struct mercury_mend_request, wanted) == 56);
static_assert(offsetof(struct mercury_mend_request, outcome) == 88);

/* A request about pages that are read-only in the nested tables. */
struct mercury_integrity_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* In: the crate::gate::IntegrityCall in bits 63:56, and its first argument. */
	u64 call;
	/* In: its second argument. */
	u64 argument;
	/* In: Linux's number of the CPU. */
	u32 cpu;
	/* Reserved; must be zero. */
	u32 reserved;
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_integrity_request) == 56);
static_assert(offsetof(struct mercury_integrity_request, header) == 0);
static_assert(offsetof(struct mercury_integrity_request, call) == 8);
static_assert(offsetof(struct mercury_integrity_request, argument) == 16);
static_assert(offsetof(struct mercury_integrity_request, cpu) == 24);
static_assert(offsetof(struct mercury_integrity_request, reserved) == 28);
static_assert(offsetof(struct mercury_integrity_request, outcome) == 32);

/* Arguments of a post-mortem. */
struct mercury_postmortem_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* In: bits of MERCURY_POSTMORTEM_*. */
	u64 flags;
	/* In: user-space address of an array of crate::snapshot::EndedCpu. */
	u64 cpus_addr;
	/* In: number of entries at cpus_addr; out: number of CPUs. */
	u32 cpus_count;
	/* Out: offset of a task's name in the task; it has 16 bytes. */
	u32 comm_offset;
	/* Out: offset of a task's number, a 32-bit word. */
	u32 pid_offset;
	/*
	 * Out: offset of the time at which a task was started, in nanoseconds since the
	 * boot, a 64-bit word.
	 */
	u32 started_offset;
	/* Out: the last words of that life, NUL-padded text. */
	u64 message[16];
	/* Out: state of the snapshot, and report of the rollback. */
	struct mercury_snapshot_status status;
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_postmortem_request) == 400);
static_assert(offsetof(struct mercury_postmortem_request, header) == 0);
static_assert(offsetof(struct mercury_postmortem_request, flags) == 8);
static_assert(offsetof(struct mercury_postmortem_request, cpus_addr) == 16);
static_assert(offsetof(struct mercury_postmortem_request, cpus_count) == 24);
static_assert(offsetof(struct mercury_postmortem_request, comm_offset) == 28);
static_assert(offsetof(struct mercury_postmortem_request, pid_offset) == 32);
static_assert(offsetof(struct mercury_postmortem_request, started_offset) == 36);
static_assert(offsetof(struct mercury_postmortem_request, message) == 40);
static_assert(offsetof(struct mercury_postmortem_request, status) == 168);
static_assert(offsetof(struct mercury_postmortem_request, outcome) == 376);

/* Arguments of a disk's dirty log. */
struct mercury_disk_log_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* In: one of MERCURY_DISK_LOG_*. */
	u32 what;
	/* In: a file descriptor of the disk, a whole one and not a partition. */
	u32 disk_fd;
	/* In, at the begin: a chunk has two to the power of this value bytes. */
	u32 chunk_shift;
	/* Reserved; must be zero. */
	u32 reserved;
	/*
	 * In, at a collection: user-space address of an array of 64-bit words, with one
	 * bit for each chunk.
	 */
	u64 map_addr;
	/* In: number of 64-bit words at map_addr. */
	u64 map_words;
	/*
	 * Out: number of chunks of the disk; at a collection, number of chunks in the
	 * log.
	 */
	u64 chunks;
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_disk_log_request) == 72);
static_assert(offsetof(struct mercury_disk_log_request, header) == 0);
static_assert(offsetof(struct mercury_disk_log_request, what) == 8);
static_assert(offsetof(struct mercury_disk_log_request, disk_fd) == 12);
static_assert(offsetof(struct mercury_disk_log_request, chunk_shift) == 16);
static_assert(offsetof(struct mercury_disk_log_request, reserved) == 20);
static_assert(offsetof(struct mercury_disk_log_request, map_addr) == 24);
static_assert(offsetof(struct mercury_disk_log_request, map_words) == 32);
static_assert(offsetof(struct mercury_disk_log_request, chunks) == 40);
static_assert(offsetof(struct mercury_disk_log_request, outcome) == 48);

/*
 * Arguments of reading the firmware's memory. Refused with
 * crate::code::Code::BadArgument: a page that is the kernel's own memory, or that the
 * firmware's map does not have above the first MiB.
 */
struct mercury_firmware_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* In: physical address of the page. */
	u64 page_phys;
	/* In: user-space address of a page that gets the content. */
	u64 data_addr;
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_firmware_request) == 48);
static_assert(offsetof(struct mercury_firmware_request, header) == 0);
static_assert(offsetof(struct mercury_firmware_request, page_phys) == 8);
static_assert(offsetof(struct mercury_firmware_request, data_addr) == 16);
static_assert(offsetof(struct mercury_firmware_request, outcome) == 24);

/* Properties of the driver and of the machine. */
struct mercury_system_info {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* Out: one of MERCURY_STATE_*. */
	u32 state;
	/* Out: number of possible CPUs, the range of Linux's CPU numbers. */
	u32 possible_cpus;
	/*
	 * Out: process that holds the controller, in the reader's PID namespace; 0:
	 * none.
	 */
	u32 controller_pid;
	/* Out: number of CPUs that are meant to be attached. */
	u32 wanted_cpus;
	/* Out: bits of MERCURY_FEATURE_*. */
	u64 features;
	/* Out: frequency of the TSC in kHz. */
	u64 tsc_khz;
	/*
	 * Out: memory in bytes that the pre-cached hypervisor holds, without the
	 * per-CPU part.
	 */
	u64 memory_fixed;
	/* Out: memory in bytes that it holds per possible CPU. */
	u64 memory_per_cpu;
	/* Out: size in bytes of the mapping at offset 0; 0 while unloaded. */
	u64 shared_size;
	/* Out: the hypervisor's version, NUL-padded ASCII. */
	u8 version[32];
	/* Out: state of the snapshot; zeros if there is none. */
	struct mercury_snapshot_status snapshot;
};

static_assert(sizeof(struct mercury_system_info) == 304);
static_assert(offsetof(struct mercury_system_info, header) == 0);
static_assert(offsetof(struct mercury_system_info, state) == 8);
static_assert(offsetof(struct mercury_system_info, possible_cpus) == 12);
static_assert(offsetof(struct mercury_system_info, controller_pid) == 16);
static_assert(offsetof(struct mercury_system_info, wanted_cpus) == 20);
static_assert(offsetof(struct mercury_system_info, features) == 24);
static_assert(offsetof(struct mercury_system_info, tsc_khz) == 32);
static_assert(offsetof(struct mercury_system_info, memory_fixed) == 40);
static_assert(offsetof(struct mercury_system_info, memory_per_cpu) == 48);
static_assert(offsetof(struct mercury_system_info, shared_size) == 56);
static_assert(offsetof(struct mercury_system_info, version) == 64);
static_assert(offsetof(struct mercury_system_info, snapshot) == 96);

/* Arguments of a load and of an unload. */
struct mercury_load_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* In: flags; must be zero. */
	u64 flags;
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_load_request) == 40);
static_assert(offsetof(struct mercury_load_request, header) == 0);
static_assert(offsetof(struct mercury_load_request, flags) == 8);
static_assert(offsetof(struct mercury_load_request, outcome) == 16);

/* Arguments of an attach and of a detach. */
struct mercury_switch_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* In: bits of MERCURY_SWITCH_*. */
	u64 flags;
	/* In: user-space address of a CPU bit mask in 64-bit words; 0: all online CPUs. */
	u64 mask_addr;
	/* In: number of 64-bit words in the mask. */
	u32 mask_words;
	/* In: number of entries at results_addr; out: number of CPUs that switched. */
	u32 results_count;
	/* In: user-space address of an array of SwitchResult; 0: none. */
	u64 results_addr;
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_switch_request) == 64);
static_assert(offsetof(struct mercury_switch_request, header) == 0);
static_assert(offsetof(struct mercury_switch_request, flags) == 8);
static_assert(offsetof(struct mercury_switch_request, mask_addr) == 16);
static_assert(offsetof(struct mercury_switch_request, mask_words) == 24);
static_assert(offsetof(struct mercury_switch_request, results_count) == 28);
static_assert(offsetof(struct mercury_switch_request, results_addr) == 32);
static_assert(offsetof(struct mercury_switch_request, outcome) == 40);

/* The result of one CPU's switch. */
struct mercury_switch_result {
	/* Linux's number of the CPU. */
	u32 cpu;
	/* crate::code::Code as a number. */
	u32 code;
	/* TSC ticks during which the switch kept interrupts off on this CPU. */
	u64 ticks;
};

static_assert(sizeof(struct mercury_switch_result) == 16);
static_assert(offsetof(struct mercury_switch_result, cpu) == 0);
static_assert(offsetof(struct mercury_switch_result, code) == 4);
static_assert(offsetof(struct mercury_switch_result, ticks) == 8);

/* Arguments of a snapshot's begin, preparation and end, and of a rollback. */
struct mercury_snapshot_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* In, at the begin: bits of MERCURY_SNAPSHOT_*. */
	u64 flags;
	/* In, at the begin: size of the pool in pages of 4 KiB. */
	u64 pool_pages;
	/*
	 * In, at the begin: pages in all active swap areas. If fewer pages are free at
	 * the instant, memory is swapped out, and the driver refuses. With
	 * MERCURY_SWAP_IN_MEMORY the driver does not compare.
	 */
	u64 swap_pages;
	/* Out: pages of memory that the snapshot holds. */
	u64 memory_pages;
	/*
	 * Out, at the begin: 1 in a machine that was restored from an image of this
	 * snapshot. There the snapshot is gone, and the hypervisor is unloaded.
	 */
	u64 restored;
	/*
	 * Out, at the begin: 1 in a machine that was put back to this snapshot.
	 * crate::snapshot::SnapshotStatus::rollback gives the reason, and
	 * crate::snapshot::SnapshotStatus::kept is 1 if the machine can go back once
	 * more.
	 */
	u64 rolled_back;
	/* Out, after a rollback: the last words of the kernel's log, NUL-padded text. */
	u64 message[16];
	/* Out: pages added to the pool because it ran low. */
	u64 added_pages;
	/*
	 * Out: pages of the pool that the driver returned because the system had no
	 * memory left.
	 */
	u64 returned_pages;
	/* Out: state and cost of the snapshot so far. */
	struct mercury_snapshot_status status;
	/* Out, at the begin: duration of the instant's steps. */
	struct mercury_instant_ticks instant;
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_snapshot_request) == 504);
static_assert(offsetof(struct mercury_snapshot_request, header) == 0);
static_assert(offsetof(struct mercury_snapshot_request, flags) == 8);
static_assert(offsetof(struct mercury_snapshot_request, pool_pages) == 16);
static_assert(offsetof(struct mercury_snapshot_request, swap_pages) == 24);
static_assert(offsetof(struct mercury_snapshot_request, memory_pages) == 32);
static_assert(offsetof(struct mercury_snapshot_request, restored) == 40);
static_assert(offsetof(struct mercury_snapshot_request, rolled_back) == 48);
static_assert(offsetof(struct mercury_snapshot_request, message) == 56);
static_assert(offsetof(struct mercury_snapshot_request, added_pages) == 184);
static_assert(offsetof(struct mercury_snapshot_request, returned_pages) == 192);
static_assert(offsetof(struct mercury_snapshot_request, status) == 200);
static_assert(offsetof(struct mercury_snapshot_request, instant) == 408);
static_assert(offsetof(struct mercury_snapshot_request, outcome) == 480);

/* Arguments of reading frames. */
struct mercury_snapshot_read_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/*
	 * In: guest-physical address of the first frame to read. Out: address at which
	 * to continue; all ones after the last frame.
	 */
	u64 cursor_phys;
	/* In: guest-physical address at which to stop, exclusive. */
	u64 end_phys;
	/* In: frames for which the arrays have room. Out: frames that were read. */
	u64 count;
	/*
	 * In: user-space address of an array of 64-bit words: gets the guest-physical
	 * addresses of the frames.
	 */
	u64 frames_addr;
	/* In: user-space address of an array of pages: gets the content of the frames. */
	u64 data_addr;
	/*
	 * In: user-space address of an array of the hashes that MERCURY_SNAPSHOT_HASH
	 * made; 0: none.
	 */
	u64 hashes_addr;
	/*
	 * Out: 1 if the pool runs low. The caller should hurry, because writers have to
	 * wait soon.
	 */
	u64 low;
	/* In: bits of MERCURY_READ_*. */
	u64 flags;
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_snapshot_read_request) == 96);
static_assert(offsetof(struct mercury_snapshot_read_request, header) == 0);
static_assert(offsetof(struct mercury_snapshot_read_request, cursor_phys) == 8);
static_assert(offsetof(struct mercury_snapshot_read_request, end_phys) == 16);
static_assert(offsetof(struct mercury_snapshot_read_request, count) == 24);
static_assert(offsetof(struct mercury_snapshot_read_request, frames_addr) == 32);
static_assert(offsetof(struct mercury_snapshot_read_request, data_addr) == 40);
static_assert(offsetof(struct mercury_snapshot_read_request, hashes_addr) == 48);
static_assert(offsetof(struct mercury_snapshot_read_request, low) == 56);
static_assert(offsetof(struct mercury_snapshot_read_request, flags) == 64);
static_assert(offsetof(struct mercury_snapshot_read_request, outcome) == 72);

/* Arguments of a dirty log of memory. */
struct mercury_log_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* Out: number of frames that were collected. */
	u64 pages;
	/*
	 * Out: number of those that are collected for devices alone: a device may still
	 * write to them, or might have at the instant.
	 */
	u64 device_pages;
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_log_request) == 48);
static_assert(offsetof(struct mercury_log_request, header) == 0);
static_assert(offsetof(struct mercury_log_request, pages) == 8);
static_assert(offsetof(struct mercury_log_request, device_pages) == 16);
static_assert(offsetof(struct mercury_log_request, outcome) == 24);

/* The machine of a snapshot or of an image, without the content of its memory. */
struct mercury_restart_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* Bits of MERCURY_RESTART_*. */
	u64 flags;
	/* Kernel virtual address of mercury_resume in that machine's system. */
	u64 resume_virt;
	/* Physical addresses of the two pages that hold mercury_resume. */
	u64 resume_phys[2];
	/* User-space address of an array of crate::restart::RestartCpu. */
	u64 cpus_addr;
	/* User-space address of an array of crate::restart::RestartRange. */
	u64 ranges_addr;
	/*
	 * Entries at cpus_addr. In a request for them: in, room in entries; out, number
	 * of entries.
	 */
	u32 cpus_count;
	/* Entries at ranges_addr, by the same rule. */
	u32 ranges_count;
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_restart_request) == 88);
static_assert(offsetof(struct mercury_restart_request, header) == 0);
static_assert(offsetof(struct mercury_restart_request, flags) == 8);
static_assert(offsetof(struct mercury_restart_request, resume_virt) == 16);
static_assert(offsetof(struct mercury_restart_request, resume_phys) == 24);
static_assert(offsetof(struct mercury_restart_request, cpus_addr) == 40);
static_assert(offsetof(struct mercury_restart_request, ranges_addr) == 48);
static_assert(offsetof(struct mercury_restart_request, cpus_count) == 56);
static_assert(offsetof(struct mercury_restart_request, ranges_count) == 60);
static_assert(offsetof(struct mercury_restart_request, outcome) == 64);

/*
 * Arguments of the fence. The fence disappears with its controller, unless a flag says
 * otherwise. No image contains it.
 */
struct mercury_fence_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* In: bits of MERCURY_FENCE_*. */
	u64 flags;
	/*
	 * In: user-space address of an array of FencePeer: the peers that may still
	 * exchange packets with this machine.
	 */
	u64 peers_addr;
	/* In: number of entries at peers_addr. */
	u32 peers_count;
	/* Reserved; must be zero. */
	u32 reserved;
	/* Out: number of packets that the fence has dropped so far. */
	u64 stopped;
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_fence_request) == 64);
static_assert(offsetof(struct mercury_fence_request, header) == 0);
static_assert(offsetof(struct mercury_fence_request, flags) == 8);
static_assert(offsetof(struct mercury_fence_request, peers_addr) == 16);
static_assert(offsetof(struct mercury_fence_request, peers_count) == 24);
static_assert(offsetof(struct mercury_fence_request, reserved) == 28);
static_assert(offsetof(struct mercury_fence_request, stopped) == 32);
static_assert(offsetof(struct mercury_fence_request, outcome) == 40);

/* A peer whose packets the fence lets through. */
struct mercury_fence_peer {
	/* The peer's IP address in network byte order; IPv4 uses the first four bytes. */
	u8 address[16];
	/* Version of IP: 4 or 6. */
	u32 version;
	/* The peer's TCP or UDP port; 0: all its packets. */
	u32 port;
};

static_assert(sizeof(struct mercury_fence_peer) == 24);
static_assert(offsetof(struct mercury_fence_peer, address) == 0);
static_assert(offsetof(struct mercury_fence_peer, version) == 16);
static_assert(offsetof(struct mercury_fence_peer, port) == 20);

/* Arguments of loading frames, and of reading them back. */
struct mercury_load_frames_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* In: user-space address of an array of crate::restart::LoadEntry. */
	u64 entries_addr;
	/* In: number of entries at entries_addr. */
	u64 count;
	/*
	 * In: user-space address of an array of pages, one for each entry that has
	 * data.
	 */
	u64 data_addr;
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_load_frames_request) == 56);
static_assert(offsetof(struct mercury_load_frames_request, header) == 0);
static_assert(offsetof(struct mercury_load_frames_request, entries_addr) == 8);
static_assert(offsetof(struct mercury_load_frames_request, count) == 16);
static_assert(offsetof(struct mercury_load_frames_request, data_addr) == 24);
static_assert(offsetof(struct mercury_load_frames_request, outcome) == 32);

/* Arguments of the status request. */
struct mercury_status_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* Out: one of MERCURY_STATE_*. */
	u32 state;
	/*
	 * In: number of entries at cpus_addr; out: entries filled (one per possible
	 * CPU).
	 */
	u32 cpus_count;
	/* In: user-space address of an array of CpuStatus. */
	u64 cpus_addr;
};

static_assert(sizeof(struct mercury_status_request) == 24);
static_assert(offsetof(struct mercury_status_request, header) == 0);
static_assert(offsetof(struct mercury_status_request, state) == 8);
static_assert(offsetof(struct mercury_status_request, cpus_count) == 12);
static_assert(offsetof(struct mercury_status_request, cpus_addr) == 16);

/* The mode of one CPU, and its history since load. */
struct mercury_cpu_status {
	/* Linux's number of the CPU. */
	u32 cpu;
	/* One of MERCURY_MODE_*, asked of the CPU just now. */
	u32 mode;
	/* 1 if the CPU is meant to be attached, else 0. */
	u32 wanted;
	/*
	 * crate::code::Code of the CPU's last departure other than by a detach; 0 if
	 * there was none.
	 */
	u32 left_because;
	/* Number of attaches since load. */
	u64 attaches;
	/* Number of detaches since load. */
	u64 detaches;
	/* TSC ticks with interrupts off in the last attach. */
	u64 attach_ticks;
	/* TSC ticks with interrupts off in the last detach. */
	u64 detach_ticks;
};

static_assert(sizeof(struct mercury_cpu_status) == 48);
static_assert(offsetof(struct mercury_cpu_status, cpu) == 0);
static_assert(offsetof(struct mercury_cpu_status, mode) == 4);
static_assert(offsetof(struct mercury_cpu_status, wanted) == 8);
static_assert(offsetof(struct mercury_cpu_status, left_because) == 12);
static_assert(offsetof(struct mercury_cpu_status, attaches) == 16);
static_assert(offsetof(struct mercury_cpu_status, detaches) == 24);
static_assert(offsetof(struct mercury_cpu_status, attach_ticks) == 32);
static_assert(offsetof(struct mercury_cpu_status, detach_ticks) == 40);

/*
 * Arguments of a measurement: hypercall round trips on one attached CPU with interrupts
 * off.
 */
struct mercury_measure_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* In: Linux's number of the CPU. */
	u32 cpu;
	/* In: number of round trips, 1 to 1,000. */
	u32 count;
	/* Out: TSC ticks of all round trips together. */
	u64 ticks;
	/* Out: TSC ticks of the same loop without the hypercall. */
	u64 overhead_ticks;
	/* Out: how the operation ended. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_measure_request) == 56);
static_assert(offsetof(struct mercury_measure_request, header) == 0);
static_assert(offsetof(struct mercury_measure_request, cpu) == 8);
static_assert(offsetof(struct mercury_measure_request, count) == 12);
static_assert(offsetof(struct mercury_measure_request, ticks) == 16);
static_assert(offsetof(struct mercury_measure_request, overhead_ticks) == 24);
static_assert(offsetof(struct mercury_measure_request, outcome) == 32);

/* Arguments of an injected fault. */
struct mercury_fault_request {
	/* Size and version of this structure. */
	struct mercury_header header;
	/* In: crate::gate::FaultPoint as a number; 0 disarms all. */
	u32 point;
	/* In: Linux's number of the CPU; u32::MAX: once on each CPU. */
	u32 cpu;
	/* In: the point fires at the n-th passage, counting from 1. */
	u32 passage;
	/*
	 * In, for crate::gate::FaultPoint::Facts: byte offset in CpuFacts, a multiple
	 * of 4.
	 */
	u32 offset;
	/* In, for crate::gate::FaultPoint::Facts: the new 32-bit word. */
	u32 value;
	/* Reserved; must be zero. */
	u32 reserved;
	/* Out: number of times that armed points have fired since load. */
	u32 fired;
};

static_assert(sizeof(struct mercury_fault_request) == 36);
static_assert(offsetof(struct mercury_fault_request, header) == 0);
static_assert(offsetof(struct mercury_fault_request, point) == 8);
static_assert(offsetof(struct mercury_fault_request, cpu) == 12);
static_assert(offsetof(struct mercury_fault_request, passage) == 16);
static_assert(offsetof(struct mercury_fault_request, offset) == 20);
static_assert(offsetof(struct mercury_fault_request, value) == 24);
static_assert(offsetof(struct mercury_fault_request, reserved) == 28);
static_assert(offsetof(struct mercury_fault_request, fired) == 32);

/* Returns the name of a code, which `mercury explain` takes. */
static inline const char *mercury_code_name(u64 code)
{
	switch (code) {
	case 0:
		return "ok";
	case 1:
		return "abi-mismatch";
	case 2:
		return "bad-argument";
	case 3:
		return "not-loaded";
	case 4:
		return "already-loaded";
	case 5:
		return "still-attached";
	case 6:
		return "busy";
	case 7:
		return "cpu-offline";
	case 8:
		return "going-down";
	case 9:
		return "bad-image";
	case 10:
		return "unknown-operation";
	case 11:
		return "crashed";
	case 12:
		return "orphaned-hypervisor";
	case 13:
		return "locked-down";
	case 20:
		return "no-contiguous-memory";
	case 21:
		return "no-memory";
	case 22:
		return "need-pages";
	case 23:
		return "more";
	case 40:
		return "vendor-unsupported";
	case 41:
		return "family-unsupported";
	case 42:
		return "no-svm";
	case 43:
		return "svm-disabled";
	case 44:
		return "no-nested-paging";
	case 45:
		return "no-asids";
	case 46:
		return "init-redirected";
	case 47:
		return "virtualization-in-use";
	case 48:
		return "intel-unsupported";
	case 50:
		return "cr0-unsupported";
	case 51:
		return "cr4-unsupported";
	case 52:
		return "efer-unsupported";
	case 53:
		return "cr3-unsupported";
	case 54:
		return "xstate-unsupported";
	case 55:
		return "supervisor-cet";
	case 56:
		return "memory-encryption";
	case 57:
		return "snp-enabled";
	case 58:
		return "pat-unsupported";
	case 59:
		return "tsc-ratio";
	case 60:
		return "invlpgb-in-use";
	case 61:
		return "machine-check-in-progress";
	case 62:
		return "page-table-isolation";
	case 63:
		return "single-step";
	case 64:
		return "memory-beyond-map";
	case 65:
		return "cpus-differ";
	case 66:
		return "kernel-untested";
	case 67:
		return "lockdown";
	case 68:
		return "fred";
	case 69:
		return "privileged-layer";
	case 70:
		return "inside-hypervisor";
	case 71:
		return "segment-unreadable";
	case 72:
		return "fact-unreadable";
	case 73:
		return "state-changed";
	case 74:
		return "mtrr-inconsistent";
	case 75:
		return "debug-active";
	case 76:
		return "hsave-in-use";
	case 77:
		return "self-test-failed";
	case 78:
		return "eraps-in-use";
	case 80:
		return "no-vmx";
	case 81:
		return "vmx-disabled";
	case 82:
		return "no-ept";
	case 83:
		return "no-unrestricted-guest";
	case 84:
		return "ept-unsupported";
	case 85:
		return "vmx-control-forced";
	case 86:
		return "vmx-control-missing";
	case 87:
		return "vmx-instruction-lost";
	case 88:
		return "vmx-fixed-bits";
	case 89:
		return "processor-trace";
	case 90:
		return "vmx-region";
	case 91:
		return "debug-store";
	case 100:
		return "invalid-guest-state";
	case 101:
		return "injected-fault";
	case 102:
		return "fault-in-switch";
	case 103:
		return "wrong-mode";
	case 120:
		return "host-exception";
	case 121:
		return "host-panic";
	case 122:
		return "unknown-exit";
	case 123:
		return "svm-released";
	case 124:
		return "microcode-update";
	case 125:
		return "cpu-reset";
	case 126:
		return "nested-map-exhausted";
	case 127:
		return "vmx-released";
	case 128:
		return "mtrr-changed";
	case 129:
		return "guest-unsupported";
	case 140:
		return "snapshot-live";
	case 141:
		return "no-snapshot";
	case 142:
		return "snapshot-missed";
	case 143:
		return "snapshot-pool";
	case 144:
		return "snapshot-lost";
	case 145:
		return "snapshot-devices";
	case 146:
		return "snapshot-quiesce";
	case 147:
		return "snapshot-hotplug";
	case 148:
		return "fence-unsupported";
	case 149:
		return "snapshot-guest";
	case 153:
		return "snapshot-swap";
	case 150:
		return "rollback-unsupported";
	case 151:
		return "rollback-missed";
	case 152:
		return "rollback-devices";
	case 154:
		return "macsec-in-use";
	case 170:
		return "rollback-repeated";
	case 159:
		return "no-post-mortem";
	case 155:
		return "log-unsupported";
	case 156:
		return "disk-unsupported";
	case 157:
		return "disk-logged";
	case 158:
		return "no-disk-log";
	case 160:
		return "restore-cpus";
	case 161:
		return "restore-mode";
	case 162:
		return "restore-overlap";
	case 163:
		return "restore-room";
	case 164:
		return "restore-incomplete";
	case 165:
		return "restore-frame";
	case 166:
		return "restore-quiesce";
	case 167:
		return "restore-memory";
	case 171:
		return "watch-no-hpet";
	case 172:
		return "watch-hpet-busy";
	case 173:
		return "watch-remapped";
	case 174:
		return "watch-no-pin";
	case 175:
		return "watch-silent";
	case 176:
		return "watch-no-pmu";
	case 177:
		return "mend-not-read-only";
	case 178:
		return "mend-changed";
	case 179:
		return "integrity-unreadable";
	case 180:
		return "swap-in-use";
	case 181:
		return "devices-unseen";
	case 182:
		return "cpus-offline";
	case 183:
		return "watchdog-unfed";
	case 184:
		return "cards-bundled";
	case 185:
		return "disks-stay-behind";
	case 186:
		return "nfs-sessions";
	case 187:
		return "disks-uncomparable";
	case 188:
		return "no-place-for-tombstone";
	case 189:
		return "disks-unheld";
	case 190:
		return "driver-missing";
	case 191:
		return "no-modprobe";
	case 192:
		return "driver-foreign";
	case 193:
		return "memory-forgotten";
	case 194:
		return "bad-rules";
	case 195:
		return "sensor-alarm";
	case 196:
		return "sensor-silent";
	case 197:
		return "service-silent";
	case 198:
		return "no-destination";
	case 199:
		return "rollback-in-vain";
	default:
		return "unknown";
	}
}

#endif /* __ASSEMBLY__ */

#endif /* MERCURY_ABI_H */
