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
 * Version of everything in this crate. Raised with every change of a layout or a
 * meaning.
 */
#define MERCURY_ABI_VERSION 8
/* VM_CR (C001_0114h). */
#define MERCURY_READABLE_VM_CR 1
/* VM_HSAVE_PA (C001_0117h). */
#define MERCURY_READABLE_VM_HSAVE_PA 2
/* SYSCFG (C001_0010h). */
#define MERCURY_READABLE_SYSCFG 4
/* SPEC_CTRL (48h). */
#define MERCURY_READABLE_SPEC_CTRL 8
/* TSC_RATIO (C000_0104h). */
#define MERCURY_READABLE_TSC_RATIO 16
/* DEBUGCTL (1D9h). */
#define MERCURY_READABLE_DEBUGCTL 32
/* S_CET (6A2h). */
#define MERCURY_READABLE_S_CET 64
/* ISST_ADDR (6A8h). */
#define MERCURY_READABLE_ISST_ADDR 128
/* XSS (DA0h). */
#define MERCURY_READABLE_XSS 256
/* MCG_STATUS (17Ah). */
#define MERCURY_READABLE_MCG_STATUS 512
/* PAT (277h). */
#define MERCURY_READABLE_PAT 1024
/* MTRRdefType and the rest of the MTRRs. */
#define MERCURY_READABLE_MTRR 2048
/* TSC_AUX (C000_0103h). */
#define MERCURY_READABLE_TSC_AUX 4096
/* MCA_CTL of SMCA bank 0 (C000_2000h). */
#define MERCURY_READABLE_SMCA 8192
/* HWCR (C001_0015h). */
#define MERCURY_READABLE_HWCR 16384
/* MICROCODE revision (8Bh). */
#define MERCURY_READABLE_MICROCODE 32768
/* IA32_FEATURE_CONTROL (3Ah). */
#define MERCURY_READABLE_FEATURE_CONTROL 0x10000
/*
 * The capability MSRs of VMX (480h to 492h), those that CPUID and IA32_VMX_BASIC
 * promise.
 */
#define MERCURY_READABLE_VMX 0x20000
/* IA32_RTIT_CTL (570h). */
#define MERCURY_READABLE_RTIT_CTL 0x40000
/* IA32_PEBS_ENABLE (3F1h). */
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
/* KVM is loaded, and what it has of the hardware it may keep (AMD). */
#define MERCURY_SYSTEM_KVM_MAY 32
/*
 * The kernel was started without mitigations of its processor's vulnerabilities
 * (mitigations=off).
 */
#define MERCURY_SYSTEM_MITIGATIONS_OFF 64
/* Bytes of one CPU's block: two pages. */
#define MERCURY_SHARED_CPU_SIZE 8192
/* "MERCURY1" in ASCII, little-endian. */
#define MERCURY_SHARED_MAGIC _UL(0x315952554352454d)
/*
 * Set in an exit code that is VMX's exit reason (bits 31:0); one of SVM has it clear or
 * is negative.
 */
#define MERCURY_EXIT_CODE_VMX _UL(0x100000000)
/* Number of ExitReasons that have a counter. */
#define MERCURY_EXIT_REASONS 24
/* Records in one CPU's log ring. */
#define MERCURY_LOG_RECORDS 64

/* Why a CPU came into the hypervisor: index into SharedCpu::exits. */
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


/* What a LogRecord reports. */
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

/* Pages of one CPU's area: physically and virtually contiguous, aligned to its size. */
#define MERCURY_AREA_PAGES 8
/* Bytes of one CPU's area. */
#define MERCURY_AREA_SIZE 32768
/* Page of the vendor's control block (VMCB, VMCS). */
#define MERCURY_AREA_PAGE_CONTROL 1
/* Page of the hypervisor's own extended state (a VMCB for VMLOAD). */
#define MERCURY_AREA_PAGE_HOST 2
/*
 * Page that only the processor uses (VM_HSAVE_PA, VMXON region). Not mapped in the
 * hypervisor's tables: it is the guard beneath the stack.
 */
#define MERCURY_AREA_PAGE_PROCESSOR 4
/* First page of the stack, which ends at the end of the area. */
#define MERCURY_AREA_PAGE_STACK 5

/*
 * Whose hardware virtualization a machine has. The driver chooses the hypervisor's
 * entry point by it; above that nothing depends on it.
 */
#define MERCURY_VENDOR_AMD 0
#define MERCURY_VENDOR_INTEL 1

/* Number of Vendors. */
#define MERCURY_VENDORS 2
/* "MERCHYPR" in ASCII, little-endian: start of the hypervisor's flat image. */
#define MERCURY_IMAGE_MAGIC _UL(0x525059484352454d)
/* Outward::svm: EFER.SVME stays set, for KVM has set it. */
#define MERCURY_KEEP_SVME 1
/* Outward::svm: GIF stays 0, for KVM has cleared it. */
#define MERCURY_KEEP_GIF_CLEAR 2
/* Where the hypervisor's private data starts in the gate page. */
#define MERCURY_GATE_PRIVATE_OFFSET 1024

/* Operations of the hypervisor on a native CPU, through the gate. */
#define MERCURY_NATIVE_OP_INIT 1
#define MERCURY_NATIVE_OP_BUILD 2
#define MERCURY_NATIVE_OP_PREFLIGHT 3
#define MERCURY_NATIVE_OP_ATTACH 4

/* "MERC" in ASCII: RCX of every hypercall. */
#define MERCURY_HYPERCALL_MAGIC 0x4352454d
/*
 * Set in what RDMSR of EFER answers on an attached AMD CPU if RSI holds
 * HYPERCALL_MAGIC: so a CPU is asked for its mode without an exception. The processor's
 * own EFER never has it.
 */
#define MERCURY_EFER_ATTACHED _UL(0x8000000000000000)

/*
 * Hypercalls of the driver: number in RAX, HYPERCALL_MAGIC in RCX, arguments in RDI and
 * RSI; result code in RAX, value in RDX. Other registers are preserved. From user mode,
 * with another RCX or on a native CPU the instruction is #UD.
 */
#define MERCURY_HYPERCALL_PING 0
#define MERCURY_HYPERCALL_DETACH 1
#define MERCURY_HYPERCALL_FLUSH 2
#define MERCURY_HYPERCALL_ARM_FAULT 3
#define MERCURY_HYPERCALL_SNAPSHOT 4


/*
 * Where a fault can be injected (fault-injection builds only). A point fires once per
 * arming.
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


/* What to do. */
#define MERCURY_SNAPSHOT_CALL_DONATE 0
#define MERCURY_SNAPSHOT_CALL_BEGIN 1
#define MERCURY_SNAPSHOT_CALL_ENTER 2
#define MERCURY_SNAPSHOT_CALL_TAKE 3
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

/* What a CPU of a machine that was put back finds in RAX where it goes on. */
#define MERCURY_ROLLED_BACK 2

/* Why a machine is put back. */
#define MERCURY_ROLLBACK_REASON_NONE 0
#define MERCURY_ROLLBACK_REASON_COMMAND 1
#define MERCURY_ROLLBACK_REASON_PANIC 2
#define MERCURY_ROLLBACK_REASON_STOP 3
#define MERCURY_ROLLBACK_REASON_TRIPLE_FAULT 4

/* Pages of a PageList. */
#define MERCURY_PAGE_LIST_MAX 511
/* Bits of a piece of a map of pages: for 4 GiB. */
#define MERCURY_MAP_BITS 0x100000
/* Entries of a TakeList: so many pages are copied with interrupts off. */
#define MERCURY_TAKE_LIST_MAX 16
/* Entries of a LandingList. */
#define MERCURY_LANDING_LIST_MAX 255
/* RestartRange::kind: memory that the image holds. */
#define MERCURY_RANGE_KEPT 0
/* Memory that the machine of the image has and the image does not need. */
#define MERCURY_RANGE_FREE 1
/* The kernel pages tables in five levels. */
#define MERCURY_RESTART_FIVE_LEVEL 1
/* Local APICs are in x2APIC mode. */
#define MERCURY_RESTART_X2APIC 2
/*
 * Not of the machine, but of how it comes: each frame may be loaded again, and holds
 * then what it was loaded with last.
 */
#define MERCURY_RESTART_AGAIN 256
/* What one frame is loaded from: the next page of the data. */
#define MERCURY_LOAD_DATA 1
/* All zeros. */
#define MERCURY_LOAD_ZERO 2
/* The ioctl type byte of every request. */
#define MERCURY_IOC_TYPE 245
/* Fills a SystemInfo. */
#define MERCURY_IOC_SYSTEM _UL(0xc108f500)
/* Fills a CpuFacts for its cpu; ENXIO if that CPU is offline. */
#define MERCURY_IOC_FACTS _UL(0xc2c8f501)
/* Pre-caches the hypervisor. Takes a LoadRequest. */
#define MERCURY_IOC_LOAD _UL(0xc028f502)
/* Frees the pre-cached hypervisor; all CPUs must be native. Takes a LoadRequest. */
#define MERCURY_IOC_UNLOAD _UL(0xc028f503)
/* Attaches CPUs. Takes a SwitchRequest. CPUs that are attached already stay so. */
#define MERCURY_IOC_ATTACH _UL(0xc040f504)
/* Detaches CPUs. Takes a SwitchRequest. CPUs that are native already stay so. */
#define MERCURY_IOC_DETACH _UL(0xc040f505)
/* Fills an array of CpuStatus. Takes a StatusRequest. */
#define MERCURY_IOC_STATUS _UL(0xc018f506)
/* Measures hypercall round trips. Takes a MeasureRequest. */
#define MERCURY_IOC_MEASURE _UL(0xc038f507)
/* Arms a fault point; ENOTTY in builds without fault injection. Takes a FaultRequest. */
#define MERCURY_IOC_FAULT _UL(0xc024f508)
/*
 * Begins a snapshot of memory: all CPUs must be attached. Takes a SnapshotRequest, the
 * same as for MERCURY_IOC_SNAPSHOT_PREPARE if that was before it.
 */
#define MERCURY_IOC_SNAPSHOT_BEGIN _UL(0xc1d0f509)
/* Takes frames of the snapshot. Takes a SnapshotTakeRequest. */
#define MERCURY_IOC_SNAPSHOT_TAKE _UL(0xc060f50a)
/* Ends the snapshot. Takes a SnapshotRequest. */
#define MERCURY_IOC_SNAPSHOT_END _UL(0xc1d0f50b)
/*
 * Describes the machine of the snapshot, or of one that is only prepared. Takes a
 * RestartRequest.
 */
#define MERCURY_IOC_SNAPSHOT_MACHINE _UL(0xc058f50c)
/*
 * Makes everything ready for a snapshot, so that it needs no time at the instant. Takes
 * a SnapshotRequest.
 */
#define MERCURY_IOC_SNAPSHOT_PREPARE _UL(0xc1d0f510)
/*
 * Puts the machine back to the snapshot that is kept; returns only if that fails. Takes
 * a SnapshotRequest.
 */
#define MERCURY_IOC_ROLLBACK _UL(0xc1d0f511)
/* Prepares to bring a machine back in place of this one. Takes a RestartRequest. */
#define MERCURY_IOC_RESTORE_BEGIN _UL(0xc058f50d)
/* Loads frames of it. Takes a LoadFramesRequest. */
#define MERCURY_IOC_RESTORE_LOAD _UL(0xc038f50e)
/* Goes on in it; returns only if that fails. Takes a LoadRequest. */
#define MERCURY_IOC_RESTORE_GO _UL(0xc028f50f)
/*
 * Lets no packet through from the instant of the next snapshot on. Takes a
 * FenceRequest.
 */
#define MERCURY_IOC_FENCE _UL(0xc040f512)
/*
 * Reads frames of a snapshot that is only prepared, as they are now. Each may change
 * meanwhile: whoever wants what they held at one instant compares then. Takes a
 * SnapshotTakeRequest.
 */
#define MERCURY_IOC_SNAPSHOT_LOOK _UL(0xc060f518)
/*
 * Reads frames that were loaded, from where they lie. Takes a LoadFramesRequest, whose
 * data is written.
 */
#define MERCURY_IOC_RESTORE_READ _UL(0xc038f519)
/*
 * Begins a log of what is written, by CPUs and devices, before the instant of a
 * snapshot that is only prepared, with MERCURY_SNAPSHOT_TRACK. Takes a LogRequest.
 */
#define MERCURY_IOC_LOG_BEGIN _UL(0xc030f51a)
/*
 * Collects what may have been written since the last time, or since the begin: what
 * MERCURY_TAKE_LOGGED means from here on. After the instant: what may have been written
 * until then. Takes a LogRequest.
 */
#define MERCURY_IOC_LOG_COLLECT _UL(0xc030f51b)
/* Keeps a log of what is written to a disk. Takes a DiskLogRequest. */
#define MERCURY_IOC_DISK_LOG _UL(0xc048f51c)
/*
 * DiskLogRequest::what: begin one. All that is written from here on is in it; it ends
 * with the controller.
 */
#define MERCURY_DISK_LOG_BEGIN 0
/* Take what may have been written since the last time, or since the begin. */
#define MERCURY_DISK_LOG_COLLECT 1
/* End it. */
#define MERCURY_DISK_LOG_END 2
/* So many disks can have a log at the same time. */
#define MERCURY_DISK_LOGS_MAX 16
/* DiskLogRequest::chunk_shift at least: 64 KiB. */
#define MERCURY_DISK_CHUNK_SHIFT_MIN 16
/* At most: 1 MiB. */
#define MERCURY_DISK_CHUNK_SHIFT_MAX 20
/* SnapshotRequest::flags: keep a log of what is written from the instant on. */
#define MERCURY_SNAPSHOT_LOG 1
/* Hash every page at the instant (fault-injection builds only). */
#define MERCURY_SNAPSHOT_HASH 2
/*
 * Keep it, to go back to: it outlives the process, until it is ended, all CPUs are
 * detached, or the machine was put back to it.
 */
#define MERCURY_SNAPSHOT_KEEP 4
/* Make room for a log of what is written before the instant. */
#define MERCURY_SNAPSHOT_TRACK 8
/* SnapshotRequest::swap_pages: every swap area that is on lies in memory, as zram does. */
#define MERCURY_SWAP_IN_MEMORY _UL(0xffffffffffffffff)
/* SnapshotTakeRequest::flags: only frames that the log had when it was collected last. */
#define MERCURY_TAKE_LOGGED 1
/* No frames that were free at the instant. */
#define MERCURY_TAKE_USED 2
/* SystemInfo::features: this build has fault points. */
#define MERCURY_FEATURE_FAULT_INJECTION 1
/* SystemInfo::state and Status: the driver is loaded, the hypervisor is not. */
#define MERCURY_STATE_UNLOADED 0
/* The hypervisor is pre-cached; every CPU is native. */
#define MERCURY_STATE_LOADED 1
/* At least one CPU is meant to be attached. */
#define MERCURY_STATE_ATTACHED 2
/* The hypervisor crashed; unload and load it before the next attach. */
#define MERCURY_STATE_CRASHED 3
/* FenceRequest::flags: take the fence away. */
#define MERCURY_FENCE_DOWN 1
/*
 * FenceRequest::flags: the fence that is up stays when the controller goes, until one
 * takes it away.
 */
#define MERCURY_FENCE_STAYS 2
/*
 * FenceRequest::flags: the fence is closed in a machine that comes back to the instant,
 * for all peers, until it is taken away there.
 */
#define MERCURY_FENCE_RETURN 4
/* FenceRequest::flags: the fence stays open in the machine that goes on. */
#define MERCURY_FENCE_OPEN_HERE 8
/*
 * FenceRequest::flags, with MERCURY_FENCE_DOWN: end IPsec's security associations in
 * all network namespaces before the fence is taken away.
 */
#define MERCURY_FENCE_FORGET 16
/* FenceRequest::peers_count at most. */
#define MERCURY_FENCE_PEERS_MAX 64
/* CpuStatus::mode: the CPU is offline. */
#define MERCURY_MODE_OFFLINE 0
/* The CPU answered that it runs on the bare hardware. */
#define MERCURY_MODE_NATIVE 1
/* The CPU answered from beneath: the hypervisor runs below it. */
#define MERCURY_MODE_ATTACHED 2
/* SwitchRequest::flags: stop at preflight; switch nothing. */
#define MERCURY_SWITCH_CHECK_ONLY 1

/* Why something was refused or ended (`mercury explain`). */
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
#define MERCURY_CODE_SWAP_IN_USE 180
#define MERCURY_CODE_DEVICES_UNSEEN 181
#define MERCURY_CODE_CPUS_OFFLINE 182
#define MERCURY_CODE_WATCHDOG_UNFED 183
#define MERCURY_CODE_CARDS_BUNDLED 184
#define MERCURY_CODE_DISKS_STAY_BEHIND 185
#define MERCURY_CODE_NFS_SESSIONS 186
#define MERCURY_CODE_DISKS_UNCOMPARABLE 187
#define MERCURY_CODE_NO_PLACE_FOR_MARK 188
#define MERCURY_CODE_DRIVER_MISSING 190
#define MERCURY_CODE_NO_MODPROBE 191
#define MERCURY_CODE_DRIVER_FOREIGN 192

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
#define MERCURY_GATE_INWARD_CS_RESERVED 178
#define MERCURY_GATE_INWARD_CS_ATTRIBUTES 180
#define MERCURY_GATE_INWARD_CS_LIMIT 184
#define MERCURY_GATE_INWARD_CS_BASE 188
#define MERCURY_GATE_INWARD_SS 192
#define MERCURY_GATE_INWARD_SS_SELECTOR 192
#define MERCURY_GATE_INWARD_SS_RESERVED 194
#define MERCURY_GATE_INWARD_SS_ATTRIBUTES 196
#define MERCURY_GATE_INWARD_SS_LIMIT 200
#define MERCURY_GATE_INWARD_SS_BASE 204
#define MERCURY_GATE_INWARD_DS 208
#define MERCURY_GATE_INWARD_DS_SELECTOR 208
#define MERCURY_GATE_INWARD_DS_RESERVED 210
#define MERCURY_GATE_INWARD_DS_ATTRIBUTES 212
#define MERCURY_GATE_INWARD_DS_LIMIT 216
#define MERCURY_GATE_INWARD_DS_BASE 220
#define MERCURY_GATE_INWARD_ES 224
#define MERCURY_GATE_INWARD_ES_SELECTOR 224
#define MERCURY_GATE_INWARD_ES_RESERVED 226
#define MERCURY_GATE_INWARD_ES_ATTRIBUTES 228
#define MERCURY_GATE_INWARD_ES_LIMIT 232
#define MERCURY_GATE_INWARD_ES_BASE 236
#define MERCURY_GATE_INWARD_FS 240
#define MERCURY_GATE_INWARD_FS_SELECTOR 240
#define MERCURY_GATE_INWARD_FS_RESERVED 242
#define MERCURY_GATE_INWARD_FS_ATTRIBUTES 244
#define MERCURY_GATE_INWARD_FS_LIMIT 248
#define MERCURY_GATE_INWARD_FS_BASE 252
#define MERCURY_GATE_INWARD_GS 256
#define MERCURY_GATE_INWARD_GS_SELECTOR 256
#define MERCURY_GATE_INWARD_GS_RESERVED 258
#define MERCURY_GATE_INWARD_GS_ATTRIBUTES 260
#define MERCURY_GATE_INWARD_GS_LIMIT 264
#define MERCURY_GATE_INWARD_GS_BASE 268
#define MERCURY_GATE_INWARD_LDTR 272
#define MERCURY_GATE_INWARD_LDTR_SELECTOR 272
#define MERCURY_GATE_INWARD_LDTR_RESERVED 274
#define MERCURY_GATE_INWARD_LDTR_ATTRIBUTES 276
#define MERCURY_GATE_INWARD_LDTR_LIMIT 280
#define MERCURY_GATE_INWARD_LDTR_BASE 284
#define MERCURY_GATE_INWARD_TR 288
#define MERCURY_GATE_INWARD_TR_SELECTOR 288
#define MERCURY_GATE_INWARD_TR_RESERVED 290
#define MERCURY_GATE_INWARD_TR_ATTRIBUTES 292
#define MERCURY_GATE_INWARD_TR_LIMIT 296
#define MERCURY_GATE_INWARD_TR_BASE 300
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

/* Offsets in what brings a machine back, for assembler. */
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
 * Size and version, at the start of every structure that user space passes to the
 * driver.
 */
struct mercury_header {
	/* Size in bytes of the whole structure as the caller knows it. */
	u32 size;
	/* MERCURY_ABI_VERSION as the caller knows it. */
	u32 version;
};

static_assert(sizeof(struct mercury_header) == 8);
static_assert(offsetof(struct mercury_header, size) == 0);
static_assert(offsetof(struct mercury_header, version) == 4);

/* One CPUID leaf as the processor returned it. */
struct mercury_cpuid_leaf {
	/* EAX. */
	u32 eax;
	/* EBX. */
	u32 ebx;
	/* ECX. */
	u32 ecx;
	/* EDX. */
	u32 edx;
};

static_assert(sizeof(struct mercury_cpuid_leaf) == 16);
static_assert(offsetof(struct mercury_cpuid_leaf, eax) == 0);
static_assert(offsetof(struct mercury_cpuid_leaf, ebx) == 4);
static_assert(offsetof(struct mercury_cpuid_leaf, ecx) == 8);
static_assert(offsetof(struct mercury_cpuid_leaf, edx) == 12);

/* A descriptor-table register: linear base address and limit in bytes minus one. */
struct mercury_table_register {
	/* Linear address. */
	u64 base_virt;
	/* Limit. */
	u64 limit;
};

static_assert(sizeof(struct mercury_table_register) == 16);
static_assert(offsetof(struct mercury_table_register, base_virt) == 0);
static_assert(offsetof(struct mercury_table_register, limit) == 8);

/* Everything that is read of one CPU. Leaves and MSRs that the CPU lacks are zero. */
struct mercury_cpu_facts {
	/* Size and version. */
	struct mercury_header header;
	/* In: the CPU to read. Linux's number. */
	u32 cpu;
	/* Initial local APIC identifier. */
	u32 apic_id;
	/* readable bits. */
	u64 readable;
	/* system bits. */
	u64 system;
	/*
	 * Highest address in use by RAM or devices according to the kernel's resource
	 * tree, inclusive, host-physical.
	 */
	u64 iomem_end_phys;
	/* Linux version code: major << 16 | minor << 8. */
	u64 kernel_version;
	/* CPUID 0. */
	struct mercury_cpuid_leaf cpuid_0;
	/* CPUID 1 (EBX holds the APIC identifier and is not compared between CPUs). */
	struct mercury_cpuid_leaf cpuid_1;
	/* CPUID 7, subleaf 0. */
	struct mercury_cpuid_leaf cpuid_7_0;
	/* CPUID 7, subleaf 1. */
	struct mercury_cpuid_leaf cpuid_7_1;
	/* CPUID Dh, subleaf 1. */
	struct mercury_cpuid_leaf cpuid_d_1;
	/* CPUID 4000_0000h, if CPUID 1 ECX bit 31 is set. */
	struct mercury_cpuid_leaf cpuid_4000_0000;
	/* CPUID 8000_0000h. */
	struct mercury_cpuid_leaf cpuid_8000_0000;
	/* CPUID 8000_0001h. */
	struct mercury_cpuid_leaf cpuid_8000_0001;
	/* CPUID 8000_0008h. */
	struct mercury_cpuid_leaf cpuid_8000_0008;
	/* CPUID 8000_000Ah: SVM. */
	struct mercury_cpuid_leaf cpuid_8000_000a;
	/* CPUID 8000_001Fh: memory encryption. */
	struct mercury_cpuid_leaf cpuid_8000_001f;
	/* CPUID 8000_0021h. */
	struct mercury_cpuid_leaf cpuid_8000_0021;
	/* CR0. */
	u64 cr0;
	/* CR3 of whatever was running. */
	u64 cr3;
	/* CR4. */
	u64 cr4;
	/* XCR0, zero where CR4.OSXSAVE is clear. */
	u64 xcr0;
	/* DR6. */
	u64 dr6;
	/* DR7. */
	u64 dr7;
	/* RFLAGS in the reading function. */
	u64 rflags;
	/* GDTR. */
	struct mercury_table_register gdtr;
	/* IDTR. */
	struct mercury_table_register idtr;
	/* TR selector. */
	u64 tr;
	/* LDTR selector. */
	u64 ldtr;
	/* CS selector. */
	u64 cs;
	/* SS selector. */
	u64 ss;
	/* TSS limit as LSL reports it for the TR selector. */
	u64 tr_limit;
	/* EFER (C000_0080h). */
	u64 efer;
	/* STAR. */
	u64 star;
	/* LSTAR. */
	u64 lstar;
	/* CSTAR. */
	u64 cstar;
	/* SFMASK. */
	u64 sfmask;
	/* SYSENTER_CS. */
	u64 sysenter_cs;
	/* SYSENTER_ESP. */
	u64 sysenter_esp;
	/* SYSENTER_EIP. */
	u64 sysenter_eip;
	/* GS base (the kernel's per-CPU base). */
	u64 gs_base;
	/* APIC_BASE (1Bh). */
	u64 apic_base;
	/* PAT. */
	u64 pat;
	/* VM_CR. */
	u64 vm_cr;
	/* VM_HSAVE_PA. */
	u64 vm_hsave_pa;
	/* SYSCFG. */
	u64 syscfg;
	/* SPEC_CTRL. */
	u64 spec_ctrl;
	/* TSC_RATIO. */
	u64 tsc_ratio;
	/* DEBUGCTL. */
	u64 debugctl;
	/* S_CET. */
	u64 s_cet;
	/* ISST_ADDR. */
	u64 isst_addr;
	/* XSS. */
	u64 xss;
	/* MCG_STATUS. */
	u64 mcg_status;
	/* TSC_AUX. */
	u64 tsc_aux;
	/* HWCR. */
	u64 hwcr;
	/* Microcode revision. */
	u64 microcode;
	/* MCA_CTL of SMCA bank 0. */
	u64 smca_ctl0;
	/* IA32_FEATURE_CONTROL (Intel). */
	u64 feature_control;
	/* MTRRdefType (2FFh). */
	u64 mtrr_def_type;
	/* FNV-1a digest over all MTRRs, to compare CPUs. */
	u64 mtrr_digest;
	/* IA32_VMX_BASIC (480h; Intel). */
	u64 vmx_basic;
	/*
	 * IA32_VMX_TRUE_PINBASED_CTLS (48Dh), or IA32_VMX_PINBASED_CTLS (481h) where
	 * IA32_VMX_BASIC bit 55 is clear: bits 31:0 must be 1, bits 63:32 may be 1.
	 */
	u64 vmx_pin_controls;
	/* IA32_VMX_TRUE_PROCBASED_CTLS (48Eh) or IA32_VMX_PROCBASED_CTLS (482h). */
	u64 vmx_primary_controls;
	/* IA32_VMX_PROCBASED_CTLS2 (48Bh). */
	u64 vmx_secondary_controls;
	/* IA32_VMX_PROCBASED_CTLS3 (492h): each bit may be 1. */
	u64 vmx_tertiary_controls;
	/* IA32_VMX_TRUE_EXIT_CTLS (48Fh) or IA32_VMX_EXIT_CTLS (483h). */
	u64 vmx_exit_controls;
	/* IA32_VMX_TRUE_ENTRY_CTLS (490h) or IA32_VMX_ENTRY_CTLS (484h). */
	u64 vmx_entry_controls;
	/* IA32_VMX_MISC (485h). */
	u64 vmx_misc;
	/* IA32_VMX_CR0_FIXED0 (486h): bits of CR0 that must be 1. */
	u64 vmx_cr0_fixed0;
	/* IA32_VMX_CR0_FIXED1 (487h): bits of CR0 that may be 1. */
	u64 vmx_cr0_fixed1;
	/* IA32_VMX_CR4_FIXED0 (488h): bits of CR4 that must be 1. */
	u64 vmx_cr4_fixed0;
	/* IA32_VMX_CR4_FIXED1 (489h): bits of CR4 that may be 1. */
	u64 vmx_cr4_fixed1;
	/* IA32_VMX_EPT_VPID_CAP (48Ch). */
	u64 vmx_ept_vpid;
	/* IA32_RTIT_CTL (570h): processor trace. */
	u64 rtit_ctl;
	/* IA32_PEBS_ENABLE (3F1h); 0 where there is none. */
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

/* One entry of the log, 64 bytes. */
struct mercury_log_record {
	/*
	 * Number of this record on this CPU, counting from 1; 0 while it is being
	 * written.
	 */
	u64 sequence;
	/* TSC when it was written. */
	u64 tsc;
	/* LogKind as a number. */
	u32 kind;
	/* Linux's CPU number. */
	u32 cpu;
	/* Meaning by kind. */
	u64 arguments[5];
};

static_assert(sizeof(struct mercury_log_record) == 64);
static_assert(offsetof(struct mercury_log_record, sequence) == 0);
static_assert(offsetof(struct mercury_log_record, tsc) == 8);
static_assert(offsetof(struct mercury_log_record, kind) == 16);
static_assert(offsetof(struct mercury_log_record, cpu) == 20);
static_assert(offsetof(struct mercury_log_record, arguments) == 24);

/*
 * The epitaph: what was known when the hypervisor gave up on this CPU. It stays until
 * unload.
 */
struct mercury_crash_record {
	/* crate::code::Code as a number; 0: no crash. */
	u32 code;
	/* Exception vector, or u32::MAX where there was none. */
	u32 vector;
	/* TSC at the crash. */
	u64 tsc;
	/* Hypervisor RIP, relative to the image's start (addr2line takes it). */
	u64 host_rip_offset;
	/* Hypervisor RSP, virtual. */
	u64 host_rsp_virt;
	/* Exception error code. */
	u64 error_code;
	/* CR2 in the hypervisor. */
	u64 host_cr2;
	/*
	 * Exit code of the last exit, as the processor gave it; on Intel with
	 * EXIT_CODE_VMX.
	 */
	u64 exit_code;
	/* First exit qualification. */
	u64 exit_info1;
	/* Second exit qualification. */
	u64 exit_info2;
	/* Event in delivery at the exit. */
	u64 exit_event;
	/* Guest RIP, virtual. */
	u64 guest_rip;
	/* Guest RFLAGS. */
	u64 guest_rflags;
	/* Guest CR0. */
	u64 guest_cr0;
	/* Guest CR2. */
	u64 guest_cr2;
	/* Guest CR3. */
	u64 guest_cr3;
	/* Guest CR4. */
	u64 guest_cr4;
	/* Guest CS and SS selectors: CS in bits 15:0, SS in bits 31:16. */
	u64 guest_cs_ss;
	/* Guest registers. */
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

/* One CPU's block. */
struct mercury_shared_cpu {
	/* SHARED_MAGIC once the hypervisor is loaded. */
	u64 magic;
	/* Linux's CPU number. */
	u32 cpu;
	/*
	 * 1 while this CPU is attached, as far as the hypervisor knows; the truth is
	 * asked of the CPU.
	 */
	u32 attached;
	/* Exits by ExitReason since load. */
	u64 exits[24];
	/* TSC ticks spent in the hypervisor by exits since load. */
	u64 exit_ticks;
	/* Attaches since load. */
	u64 attaches;
	/* Detaches since load, of whatever kind. */
	u64 detaches;
	/*
	 * crate::code::Code of the last departure that was not a detach; 0 if there was
	 * none.
	 */
	u64 left_because;
	/* Records ever written to log. */
	u64 log_written;
	/* The last crash. */
	struct mercury_crash_record crash;
	/*
	 * Written by the driver: 1 while KVM may use SVM above the hypervisor.
	 * Otherwise EFER shows the hypervisor's own SVME, and to clear it is to leave.
	 */
	u32 kvm_may;
	/* Padding to the second page. */
	u32 reserved[865];
	/* The ring; record n (from 1) is at index (n - 1) % LOG_RECORDS. */
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
static_assert(offsetof(struct mercury_shared_cpu, reserved) == 636);
static_assert(offsetof(struct mercury_shared_cpu, log) == 4096);

/*
 * Start of the hypervisor's flat image. Offsets are in bytes from the image's start;
 * text starts at a page boundary, as do read-only data and data.
 */
struct mercury_image_header {
	/* IMAGE_MAGIC. */
	u64 magic;
	/* crate::MERCURY_ABI_VERSION. */
	u32 abi_version;
	/* 1 if built with fault points. */
	u32 fault_injection;
	/* End of text (readable and executable), which starts at 0 with this header. */
	u64 text_end;
	/* End of read-only data, which starts at text_end. */
	u64 rodata_end;
	/* End of initialised data in the file. */
	u64 file_end;
	/* End of the image in memory, zero-filled data included. */
	u64 memory_end;
	/* Offset of the ELF64 Rela table; only R_X86_64_RELATIVE occurs. */
	u64 rela_offset;
	/* Bytes of the Rela table. */
	u64 rela_size;
	/*
	 * Offsets of the native entry points, by Vendor; 0: this image has nothing for
	 * that vendor.
	 */
	u64 entry_offsets[2];
	/* Version, NUL-padded ASCII. */
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
 * Physically contiguous memory that belongs to the hypervisor: mapped in its tables,
 * hidden in the nested ones.
 */
struct mercury_owned_range {
	/* First byte, host-physical, page-aligned. */
	u64 start_phys;
	/* Length in 4 KiB pages. */
	u64 pages;
};

static_assert(sizeof(struct mercury_owned_range) == 16);
static_assert(offsetof(struct mercury_owned_range, start_phys) == 0);
static_assert(offsetof(struct mercury_owned_range, pages) == 8);

/* What NativeOp::Init gets: everything that does not change until unload. */
struct mercury_boot_info {
	/* crate::MERCURY_ABI_VERSION. */
	u32 abi_version;
	/* 1 if the kernel runs with five-level paging. */
	u32 five_level;
	/* Kernel virtual address of physical address 0 (the direct map's base). */
	u64 direct_map_virt;
	/* Start of the image, virtual. */
	u64 image_virt;
	/* Address of an array of OwnedRange: everything to hide. */
	u64 owned_virt;
	/* Number of entries in it. */
	u64 owned_count;
	/*
	 * Address of an array of host-physical addresses of zeroed pages for nested
	 * tables. They lie inside owned ranges. The driver may extend the array between
	 * two calls of NativeOp::Build.
	 */
	u64 pool_virt;
	/* Number of entries in it. */
	u64 pool_count;
	/*
	 * End of the highest address in use by RAM or devices, exclusive,
	 * host-physical: mapped eagerly.
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

/* A segment register as the driver read it from the live descriptor tables. */
struct mercury_segment {
	/* Selector. */
	u16 selector;
	/* Zero. */
	u16 reserved;
	/*
	 * As LAR returns it, shifted right by 8: type, S, DPL, P in bits 7:0; AVL, L,
	 * D/B, G in bits 15:12. Zero for a null selector.
	 */
	u32 attributes;
	/* Limit in bytes, as LSL returns it. */
	u32 limit;
	/*
	 * Base address; 32 bits, as for every code or data segment that has one in a
	 * descriptor.
	 */
	u32 base;
};

static_assert(sizeof(struct mercury_segment) == 16);
static_assert(offsetof(struct mercury_segment, selector) == 0);
static_assert(offsetof(struct mercury_segment, reserved) == 2);
static_assert(offsetof(struct mercury_segment, attributes) == 4);
static_assert(offsetof(struct mercury_segment, limit) == 8);
static_assert(offsetof(struct mercury_segment, base) == 12);

/* A pseudo-descriptor: LGDT and LIDT take the address of limit. */
struct mercury_descriptor_table {
	/* Zero. */
	u16 padding[3];
	/* Limit. */
	u16 limit;
	/* Linear address. */
	u64 base_virt;
};

static_assert(sizeof(struct mercury_descriptor_table) == 16);
static_assert(offsetof(struct mercury_descriptor_table, padding) == 0);
static_assert(offsetof(struct mercury_descriptor_table, limit) == 6);
static_assert(offsetof(struct mercury_descriptor_table, base_virt) == 8);

/* What the driver and the gate's way in leave for the hypervisor. */
struct mercury_inward {
	/* RSP at the return label. */
	u64 rsp;
	/* The return label. */
	u64 rip;
	/* RFLAGS at the return label. */
	u64 rflags;
	/* CR3. */
	u64 cr3;
	/* CR4. */
	u64 cr4;
	/* EFER as it was before SVME was set for the gate (AMD). */
	u64 efer;
	/* VM_HSAVE_PA as it was before, restored at detach (AMD). */
	u64 vm_hsave_pa;
	/* CS. Filled by the driver. */
	struct mercury_segment cs;
	/* SS. Filled by the driver. */
	struct mercury_segment ss;
	/* DS. Filled by the driver. */
	struct mercury_segment ds;
	/* ES. Filled by the driver. */
	struct mercury_segment es;
	/* FS, without its base. Filled by the driver on Intel. */
	struct mercury_segment fs;
	/* GS, without its base. Filled by the driver on Intel. */
	struct mercury_segment gs;
	/* LDTR, without its base. Filled by the driver on Intel. */
	struct mercury_segment ldtr;
	/* TR, without its base. Filled by the driver on Intel. */
	struct mercury_segment tr;
	/* Base of LDTR, virtual; 0 for a null selector. */
	u64 ldtr_base_virt;
	/* Base of TR, virtual. */
	u64 tr_base_virt;
	/* GDTR. Filled by the gate on Intel; on AMD the hypervisor reads it itself. */
	struct mercury_descriptor_table gdtr;
	/* IDTR, likewise. */
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

/* What the gate's way out puts back. */
struct mercury_outward {
	/* CR0. */
	u64 cr0;
	/* CR2. */
	u64 cr2;
	/* CR3. */
	u64 cr3;
	/* CR4. */
	u64 cr4;
	/* DR6. */
	u64 dr6;
	/* DR7. */
	u64 dr7;
	/* GDTR, as LGDT takes it: limit in the two bytes before the address. */
	struct mercury_descriptor_table gdtr;
	/* IDTR, as LIDT takes it. */
	struct mercury_descriptor_table idtr;
	/*
	 * IA32_DEBUGCTL that only the gate can load (Intel): one that has branches
	 * stored, through the page tables in use. 0: none.
	 */
	u64 debugctl;
	/* Selectors ES, CS, SS, DS. */
	u64 selectors[4];
	/* RIP. */
	u64 rip;
	/* RFLAGS. */
	u64 rflags;
	/* General registers; entry 4 is RSP. */
	u64 registers[16];
	/* Selectors FS and GS (Intel; on AMD they are back before the gate). */
	u64 thread_selectors[2];
	/* Bases of FS and GS (Intel), virtual. */
	u64 thread_bases[2];
	/*
	 * EFER that only the gate can load (Intel): one without NXE, which the
	 * hypervisor's tables need. 0: none.
	 */
	u64 efer;
	/* What the gate leaves in SVM (AMD): KEEP_SVME, KEEP_GIF_CLEAR. */
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
 * NMIs on a processor without a global interrupt flag. One that strikes between the
 * gate's first instruction and its last, or in the hypervisor, comes to the driver's
 * handler in the gate page (NmiBlock::handler_virt), on whatever stack of the area is
 * in use. The handler notes it in NmiBlock::pending and returns without IRET, so that
 * NMIs stay blocked, as they would be in the handler of the system above: a second one
 * waits in the processor. The next entry into the guest injects the NMI; the gate's way
 * out raises it with INT 2 when the system's tables are back. If it strikes between the
 * last look at pending and the entry (window_start_virt up to window_end_virt), the
 * handler returns to restart_virt, which looks again.
 */
struct mercury_nmi_block {
	/* How many NMIs are to be delivered. */
	u64 pending;
	/* The handler, virtual; 0: this processor needs none. Filled at load. */
	u64 handler_virt;
	/* Start of the window, virtual. Filled by the hypervisor. */
	u64 window_start_virt;
	/* End of the window, virtual. */
	u64 window_end_virt;
	/* Where to begin again, virtual. */
	u64 restart_virt;
	/*
	 * The GDT of the passage: null, unused, code, data at the kernel's selectors.
	 * Filled at load.
	 */
	u64 gdt[4];
	/*
	 * The IDT of the passage: vectors 0 to 2, of which only NMI is present. Filled
	 * at load.
	 */
	u64 idt[6];
	/* Its GDTR. Filled at load. */
	struct mercury_descriptor_table gdtr;
	/* Its IDTR. Filled at load. */
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

/* Arming of a fault point, kept by the driver and handed to the hypervisor in its area. */
struct mercury_fault_arm {
	/* FaultPoint as a number. */
	u32 point;
	/* Fires at this passage, counting down to 0. */
	u32 passage;
	/*
	 * For FaultPoint::Facts: byte offset of an aligned 32-bit word in
	 * crate::facts::CpuFacts. For FaultPoint::RunField: what is described there.
	 */
	u32 offset;
	/*
	 * For FaultPoint::Facts: its new value. For FaultPoint::RunField: the bits to
	 * be flipped.
	 */
	u32 value;
};

static_assert(sizeof(struct mercury_fault_arm) == 16);
static_assert(offsetof(struct mercury_fault_arm, point) == 0);
static_assert(offsetof(struct mercury_fault_arm, passage) == 4);
static_assert(offsetof(struct mercury_fault_arm, offset) == 8);
static_assert(offsetof(struct mercury_fault_arm, value) == 12);

/*
 * First bytes of a CPU's area. The hypervisor's private per-CPU data follows at
 * GATE_PRIVATE_OFFSET.
 */
struct mercury_gate_block {
	/* CR3 of the hypervisor's tables. Filled at load. */
	u64 host_cr3;
	/*
	 * CR4 in the hypervisor, from a white list: PAE, MCE, OSFXSR, OSXMMEXCPT, and
	 * LA57 if the kernel has it, VMXE on Intel. Filled at load.
	 */
	u64 host_cr4;
	/* Native entry point, virtual. Filled at load. */
	u64 entry_virt;
	/* The gate's way out, virtual. Filled at load. */
	u64 leave_virt;
	/* Host-physical address of this area. Filled at load. */
	u64 area_phys;
	/* Virtual address of this CPU's crate::shared::SharedCpu. Filled at load. */
	u64 shared_virt;
	/*
	 * A virtual page of the hypervisor's that shows a guest's control block of
	 * KVM's, read-only. Filled at load.
	 */
	u64 window_virt;
	/* Virtual address of the page-table entry behind it. Filled at load. */
	u64 window_entry_virt;
	/* Linux's CPU number. Filled at load. */
	u32 cpu;
	/* NativeOp to perform. Filled by the driver before each call. */
	u32 operation;
	/* Its argument: a virtual address or 0. */
	u64 argument;
	/* Out: what the result code refers to. */
	u64 detail[2];
	/* Armed fault point of this CPU (fault-injection builds). */
	struct mercury_fault_arm fault;
	/* Fault points that have fired on this CPU since load (fault-injection builds). */
	u64 fault_fired;
	/* Way in. */
	struct mercury_inward inward;
	/* Way out. */
	struct mercury_outward outward;
	/*
	 * The gate's own: RIP, CS, RFLAGS, RSP, SS for the IRETQ of a way out to user
	 * mode.
	 */
	u64 frame[5];
	/*
	 * Not 0: a machine check struck in the hypervisor and the system above has yet
	 * to get it. The gate raises it on the way out.
	 */
	u64 machine_check;
	/* How an NMI finds its way where the processor cannot hold it back (Intel). */
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

/* How a machine was put back. */
struct mercury_rollback_report {
	/* How often since load. */
	u64 count;
	/* RollbackReason of the last time. */
	u32 reason;
	/* The CPU that asked for it. */
	u32 cpu;
	/* Where that was: the system's RIP. */
	u64 rip_virt;
	/* Pages that were copied back. */
	u64 pages;
	/* PCI functions that were silenced. */
	u64 functions;
	/* TSC ticks from the request until all CPUs were there. */
	u64 meet_ticks;
	/* TSC ticks from there until everything was in place. */
	u64 work_ticks;
	/*
	 * Pages that were compared with what they held at the instant (fault-injection
	 * builds only).
	 */
	u64 compared;
	/* Those that were different. */
	u64 different;
	/* The first of them, guest-physical. */
	u64 different_phys;
};

static_assert(sizeof(struct mercury_rollback_report) == 80);
static_assert(offsetof(struct mercury_rollback_report, count) == 0);
static_assert(offsetof(struct mercury_rollback_report, reason) == 8);
static_assert(offsetof(struct mercury_rollback_report, cpu) == 12);
static_assert(offsetof(struct mercury_rollback_report, rip_virt) == 16);
static_assert(offsetof(struct mercury_rollback_report, pages) == 24);
static_assert(offsetof(struct mercury_rollback_report, functions) == 32);
static_assert(offsetof(struct mercury_rollback_report, meet_ticks) == 40);
static_assert(offsetof(struct mercury_rollback_report, work_ticks) == 48);
static_assert(offsetof(struct mercury_rollback_report, compared) == 56);
static_assert(offsetof(struct mercury_rollback_report, different) == 64);
static_assert(offsetof(struct mercury_rollback_report, different_phys) == 72);

/* Pages for the pool. */
struct mercury_page_list {
	/* How many. */
	u64 count;
	/* Host-physical addresses. */
	u64 pages_phys[511];
};

static_assert(sizeof(struct mercury_page_list) == 4096);
static_assert(offsetof(struct mercury_page_list, count) == 0);
static_assert(offsetof(struct mercury_page_list, pages_phys) == 8);

/* What is to be kept. */
struct mercury_snapshot_setup {
	/*
	 * Address of an array of crate::gate::OwnedRange, ascending: the memory to
	 * keep. It stays until the end.
	 */
	u64 memory_virt;
	/* Number of entries in it. */
	u64 memory_count;
	/*
	 * Address of an array of addresses of bitmaps, of MAP_BITS each: a bit for each
	 * page that is kept, in their order, set for those that are copied at the
	 * instant. 0: none.
	 */
	u64 lasting_virt;
	/*
	 * Address of an array of free_count addresses of such bitmaps, or 0 where no
	 * bit is set: a bit for each page of the address space, set for those that were
	 * free at the instant. What they held does not matter: they are taken as zeros.
	 */
	u64 free_virt;
	/* Number of entries in it. */
	u64 free_count;
	/*
	 * Address of an array of one hash for each page that is kept, in their order,
	 * filled at the instant; 0: none (fault-injection builds only).
	 */
	u64 hashes_virt;
	/* CPUs that will enter. */
	u32 cpus;
	/* 1 to keep a log of what is written from the instant on. */
	u32 log;
	/*
	 * Address of an array of crate::restart::RestartCpu of these CPUs, for a
	 * snapshot that is to be kept; it stays until the end. 0: it is to be taken.
	 */
	u64 keep_virt;
	/* TSC ticks that devices are given to come to rest before memory is put back. */
	u64 settle_ticks;
	/* PCI buses with devices that are to be silenced then, a bit for each. */
	u64 buses[4];
};

static_assert(sizeof(struct mercury_snapshot_setup) == 104);
static_assert(offsetof(struct mercury_snapshot_setup, memory_virt) == 0);
static_assert(offsetof(struct mercury_snapshot_setup, memory_count) == 8);
static_assert(offsetof(struct mercury_snapshot_setup, lasting_virt) == 16);
static_assert(offsetof(struct mercury_snapshot_setup, free_virt) == 24);
static_assert(offsetof(struct mercury_snapshot_setup, free_count) == 32);
static_assert(offsetof(struct mercury_snapshot_setup, hashes_virt) == 40);
static_assert(offsetof(struct mercury_snapshot_setup, cpus) == 48);
static_assert(offsetof(struct mercury_snapshot_setup, log) == 52);
static_assert(offsetof(struct mercury_snapshot_setup, keep_virt) == 56);
static_assert(offsetof(struct mercury_snapshot_setup, settle_ticks) == 64);
static_assert(offsetof(struct mercury_snapshot_setup, buses) == 72);

/*
 * A log of what CPUs write before a snapshot's instant. It ends for each CPU when that
 * enters the snapshot.
 */
struct mercury_log_setup {
	/* As SnapshotSetup::memory_virt; the snapshot's must be the same. */
	u64 memory_virt;
	/* Number of entries in it. */
	u64 memory_count;
	/*
	 * Address of an array of map_count addresses of bitmaps as of
	 * SnapshotSetup::free_virt: what has been written since it was collected last.
	 * Both sides set bits in them, by locked instructions.
	 */
	u64 written_virt;
	/*
	 * Address of another such array, with bitmaps in the same places: what is
	 * collected. Bits are only set.
	 */
	u64 collected_virt;
	/* Number of entries in each. */
	u64 map_count;
};

static_assert(sizeof(struct mercury_log_setup) == 40);
static_assert(offsetof(struct mercury_log_setup, memory_virt) == 0);
static_assert(offsetof(struct mercury_log_setup, memory_count) == 8);
static_assert(offsetof(struct mercury_log_setup, written_virt) == 16);
static_assert(offsetof(struct mercury_log_setup, collected_virt) == 24);
static_assert(offsetof(struct mercury_log_setup, map_count) == 32);

/* How far a collection of the log is. */
struct mercury_log_collect {
	/*
	 * In: where to begin, guest-physical. Out: where to go on; all ones behind the
	 * last frame.
	 */
	u64 next_phys;
	/* Out: frames that were moved, added to what was there. */
	u64 pages;
};

static_assert(sizeof(struct mercury_log_collect) == 16);
static_assert(offsetof(struct mercury_log_collect, next_phys) == 0);
static_assert(offsetof(struct mercury_log_collect, pages) == 8);

/* One frame to be taken. */
struct mercury_take_entry {
	/* The frame, guest-physical. */
	u64 frame_phys;
	/* Page that gets its content, host-physical: none that is kept. */
	u64 to_phys;
};

static_assert(sizeof(struct mercury_take_entry) == 16);
static_assert(offsetof(struct mercury_take_entry, frame_phys) == 0);
static_assert(offsetof(struct mercury_take_entry, to_phys) == 8);

/* Frames to be taken, best in ascending order. */
struct mercury_take_list {
	/* How many. */
	u32 count;
	/* Zero. */
	u32 reserved;
	/* Written by the hypervisor: bit n is set if entry n had been taken before. */
	u64 taken_before;
	/* The frames. */
	struct mercury_take_entry entries[16];
};

static_assert(sizeof(struct mercury_take_list) == 272);
static_assert(offsetof(struct mercury_take_list, count) == 0);
static_assert(offsetof(struct mercury_take_list, reserved) == 4);
static_assert(offsetof(struct mercury_take_list, taken_before) == 8);
static_assert(offsetof(struct mercury_take_list, entries) == 16);

/* What a snapshot costs. */
struct mercury_snapshot_status {
	/* 1 while there is one. */
	u32 live;
	/* 1 if it holds all that memory held at the instant. */
	u32 exact;
	/* Pages of the pool that are free. */
	u64 free_pages;
	/* Copies in the pool. */
	u64 copies;
	/* Copies ever made. */
	u64 copied;
	/* Frames taken. */
	u64 taken;
	/* crate::code::Code of why it is not exact. */
	u32 spoilt;
	/* 1 if it is kept. */
	u32 kept;
	/* Pages that were copied at the instant: what devices have for good. */
	u64 lasting;
	/* TSC ticks that this took. */
	u64 lasting_ticks;
	/*
	 * TSC ticks of the instant, in the hypervisor, on the CPU that came last: those
	 * are part of it.
	 */
	u64 enter_ticks;
	/* Calls of SnapshotCall::Take that were told that the pool runs low. */
	u64 hurries;
	/* Times that a writer waited, because little of the pool was left or nothing. */
	u64 waits;
	/* How this machine was put back last. */
	struct mercury_rollback_report rollback;
};

static_assert(sizeof(struct mercury_snapshot_status) == 168);
static_assert(offsetof(struct mercury_snapshot_status, live) == 0);
static_assert(offsetof(struct mercury_snapshot_status, exact) == 4);
static_assert(offsetof(struct mercury_snapshot_status, free_pages) == 8);
static_assert(offsetof(struct mercury_snapshot_status, copies) == 16);
static_assert(offsetof(struct mercury_snapshot_status, copied) == 24);
static_assert(offsetof(struct mercury_snapshot_status, taken) == 32);
static_assert(offsetof(struct mercury_snapshot_status, spoilt) == 40);
static_assert(offsetof(struct mercury_snapshot_status, kept) == 44);
static_assert(offsetof(struct mercury_snapshot_status, lasting) == 48);
static_assert(offsetof(struct mercury_snapshot_status, lasting_ticks) == 56);
static_assert(offsetof(struct mercury_snapshot_status, enter_ticks) == 64);
static_assert(offsetof(struct mercury_snapshot_status, hurries) == 72);
static_assert(offsetof(struct mercury_snapshot_status, waits) == 80);
static_assert(offsetof(struct mercury_snapshot_status, rollback) == 88);

/* What the instant took, in TSC ticks: one step after the other, on the CPU that leads. */
struct mercury_instant_ticks {
	/* Until tasks are frozen and devices are quiesced. */
	u64 quiesce;
	/* Until all CPUs stand still, with interrupts off. */
	u64 gather;
	/* Until the core of the system is suspended. */
	u64 suspend;
	/*
	 * Until all of them have looked for what devices have for good, and for what is
	 * free.
	 */
	u64 search;
	/* Until the state of this CPU is saved. */
	u64 save;
	/*
	 * Until this CPU is back from the hypervisor, and has written for the first
	 * time.
	 */
	u64 enter;
	/* Until the core of the system goes on. */
	u64 resume;
	/* Until all CPUs go on. */
	u64 release;
	/* Until devices and tasks go on. */
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
 * What has to be in a processor's registers before C code can restore the rest. Offsets
 * are for assembler.
 */
struct mercury_saved_cpu {
	/* This structure's own address in the kernel. */
	u64 virt;
	/* CR0. */
	u64 cr0;
	/* CR3. */
	u64 cr3;
	/* CR4, without what is there for hardware virtualization. */
	u64 cr4;
	/* Where to go on, with 1 in RAX. */
	u64 rip;
	/* The stack there. */
	u64 rsp;
	/* RFLAGS there. */
	u64 rflags;
	/* Callee-saved registers: RBX, RBP, R12 to R15. */
	u64 registers[6];
	/* FS base. */
	u64 fs_base;
	/* GS base: the kernel's. */
	u64 gs_base;
	/* GS base of user mode, while the kernel runs. */
	u64 kernel_gs_base;
	/* GDTR. */
	struct mercury_descriptor_table gdtr;
	/* IDTR. */
	struct mercury_descriptor_table idtr;
	/* DS and ES. */
	u64 data_selectors[2];
	/*
	 * Zeros; whoever brings the machine back puts random bytes here, so that two
	 * machines from one image do not share what they think is random.
	 */
	u64 seed[4];
	/* The thread that ran there, by Linux's number: for debuggers. */
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
 * Where CPUs land. Read at its physical address, on tables that map all memory at its
 * own.
 */
struct mercury_landing {
	/* Root of these tables. */
	u64 root_phys;
	/* First page of what is to be copied: a LandingList; 0: nothing. */
	u64 list_phys;
	/* An array of the physical address of each CPU's SavedCpu. */
	u64 cpus_phys;
	/* Address of mercury_resume in the system of the image. */
	u64 resume_virt;
	/* CPUs that will land. */
	u32 cpus;
	/* CPUs that have landed. */
	u32 arrived;
	/* 1 once everything is at home. */
	u32 copied;
	/* Zero. */
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

/* A page of copies to make. */
struct mercury_landing_list {
	/* Physical address of the next one; 0: none. */
	u64 next_phys;
	/* Entries in use. */
	u64 count;
	/*
	 * Physical addresses: a frame's home, and where its content waits; 0: it is all
	 * zeros.
	 */
	u64 copies[510];
};

static_assert(sizeof(struct mercury_landing_list) == 4096);
static_assert(offsetof(struct mercury_landing_list, next_phys) == 0);
static_assert(offsetof(struct mercury_landing_list, count) == 8);
static_assert(offsetof(struct mercury_landing_list, copies) == 16);

/* A CPU of the machine in an image. */
struct mercury_restart_cpu {
	/* Linux's CPU number. */
	u32 cpu;
	/* Its local APIC's ID. */
	u32 apic_id;
	/* Physical address of its SavedCpu. */
	u64 saved_phys;
};

static_assert(sizeof(struct mercury_restart_cpu) == 16);
static_assert(offsetof(struct mercury_restart_cpu, cpu) == 0);
static_assert(offsetof(struct mercury_restart_cpu, apic_id) == 4);
static_assert(offsetof(struct mercury_restart_cpu, saved_phys) == 8);

/* A range of physical memory, in an image. */
struct mercury_restart_range {
	/* Its start. */
	u64 start_phys;
	/* Its length in pages. */
	u64 pages;
	/* MERCURY_RANGE_*. */
	u64 kind;
};

static_assert(sizeof(struct mercury_restart_range) == 24);
static_assert(offsetof(struct mercury_restart_range, start_phys) == 0);
static_assert(offsetof(struct mercury_restart_range, pages) == 8);
static_assert(offsetof(struct mercury_restart_range, kind) == 16);

/* One frame to be put home. */
struct mercury_load_entry {
	/* Its home, physical. */
	u64 frame_phys;
	/*
	 * MERCURY_LOAD_*, or the home of a frame that was loaded before and has the
	 * same content.
	 */
	u64 source;
};

static_assert(sizeof(struct mercury_load_entry) == 16);
static_assert(offsetof(struct mercury_load_entry, frame_phys) == 0);
static_assert(offsetof(struct mercury_load_entry, source) == 8);

/* How an operation ended. */
struct mercury_outcome {
	/* crate::code::Code as a number; 0 is success. */
	u32 code;
	/* The CPU it concerns, or u32::MAX where it concerns none in particular. */
	u32 cpu;
	/*
	 * What the code's explanation refers to: the offending register, field or
	 * address.
	 */
	u64 detail[2];
};

static_assert(sizeof(struct mercury_outcome) == 24);
static_assert(offsetof(struct mercury_outcome, code) == 0);
static_assert(offsetof(struct mercury_outcome, cpu) == 4);
static_assert(offsetof(struct mercury_outcome, detail) == 8);

/* Arguments of the log of what is written to a disk. */
struct mercury_disk_log_request {
	/* Size and version. */
	struct mercury_header header;
	/* MERCURY_DISK_LOG_*. */
	u32 what;
	/* A descriptor of the disk: a whole one. */
	u32 disk_fd;
	/* Begin: a chunk is of two to the power of so many bytes. */
	u32 chunk_shift;
	/* Zero. */
	u32 reserved;
	/* Collect: user-space address of an array of words, with a bit for each chunk. */
	u64 map_addr;
	/* Words in it. */
	u64 map_words;
	/* Out: chunks of the disk; of a collection, those that are in it. */
	u64 chunks;
	/* Out. */
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

/* What the driver and the machine are. */
struct mercury_system_info {
	/* Size and version. */
	struct mercury_header header;
	/* MERCURY_STATE_*. */
	u32 state;
	/* Number of possible CPUs: the range of Linux's CPU numbers. */
	u32 possible_cpus;
	/* Process that controls Mercury, 0 if none (in the reader's PID namespace). */
	u32 controller_pid;
	/* Number of CPUs that are meant to be attached. */
	u32 wanted_cpus;
	/* MERCURY_FEATURE_*. */
	u64 features;
	/* TSC frequency in kHz. */
	u64 tsc_khz;
	/* Memory held by the pre-cached hypervisor, in bytes, without the per-CPU part. */
	u64 memory_fixed;
	/* Memory held per possible CPU, in bytes. */
	u64 memory_per_cpu;
	/* Size in bytes of what can be mapped at offset 0; 0 while unloaded. */
	u64 shared_size;
	/* The hypervisor's version, NUL-padded ASCII. */
	u8 version[32];
	/* The snapshot, if there is one. */
	struct mercury_snapshot_status snapshot;
};

static_assert(sizeof(struct mercury_system_info) == 264);
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

/* Arguments of load and unload. */
struct mercury_load_request {
	/* Size and version. */
	struct mercury_header header;
	/* Must be zero. */
	u64 flags;
	/* Out. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_load_request) == 40);
static_assert(offsetof(struct mercury_load_request, header) == 0);
static_assert(offsetof(struct mercury_load_request, flags) == 8);
static_assert(offsetof(struct mercury_load_request, outcome) == 16);

/* Arguments of attach and detach. */
struct mercury_switch_request {
	/* Size and version. */
	struct mercury_header header;
	/* MERCURY_SWITCH_*. */
	u64 flags;
	/*
	 * User-space address of a CPU bit mask in 64-bit words, or 0 for all online
	 * CPUs.
	 */
	u64 mask_addr;
	/* Number of 64-bit words in the mask. */
	u32 mask_words;
	/* In: number of entries at results_addr; out: number of CPUs that switched. */
	u32 results_count;
	/* User-space address of an array of SwitchResult, or 0. */
	u64 results_addr;
	/* Out. */
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

/* What one CPU's switch took. */
struct mercury_switch_result {
	/* Linux's CPU number. */
	u32 cpu;
	/* crate::code::Code as a number. */
	u32 code;
	/* TSC ticks that the switch kept interrupts off on this CPU. */
	u64 ticks;
};

static_assert(sizeof(struct mercury_switch_result) == 16);
static_assert(offsetof(struct mercury_switch_result, cpu) == 0);
static_assert(offsetof(struct mercury_switch_result, code) == 4);
static_assert(offsetof(struct mercury_switch_result, ticks) == 8);

/* Arguments of a snapshot's begin and end. */
struct mercury_snapshot_request {
	/* Size and version. */
	struct mercury_header header;
	/* In, at the begin: MERCURY_SNAPSHOT_*. */
	u64 flags;
	/* In, at the begin: pages of the pool. */
	u64 pool_pages;
	/*
	 * In, at the begin: pages of all swap areas that are on. If fewer are free at
	 * the instant, memory is swapped out, and the driver refuses.
	 * MERCURY_SWAP_IN_MEMORY: the driver does not look.
	 */
	u64 swap_pages;
	/* Out: pages of memory that the snapshot holds. */
	u64 memory_pages;
	/*
	 * Out, at the begin: 1 in a machine that was brought back from an image of this
	 * snapshot. There is none any more, and the hypervisor is unloaded.
	 */
	u64 restored;
	/*
	 * Out, at the begin: 1 in a machine that was put back to this snapshot. There
	 * is none any more; crate::snapshot::SnapshotStatus::rollback says how it came
	 * to that.
	 */
	u64 rolled_back;
	/* Out, then: what the kernel said last, NUL-padded text. */
	u64 message[16];
	/* Out: pages that were added to the pool because it ran low. */
	u64 added_pages;
	/*
	 * Out: pages of the pool that the system got back because it had no memory
	 * left.
	 */
	u64 returned_pages;
	/* Out: what it has cost so far. */
	struct mercury_snapshot_status status;
	/* Out, at the begin. */
	struct mercury_instant_ticks instant;
	/* Out. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_snapshot_request) == 464);
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
static_assert(offsetof(struct mercury_snapshot_request, instant) == 368);
static_assert(offsetof(struct mercury_snapshot_request, outcome) == 440);

/* Arguments of a take. */
struct mercury_snapshot_take_request {
	/* Size and version. */
	struct mercury_header header;
	/*
	 * In: where to begin, guest-physical. Out: where to go on; all ones behind the
	 * last frame.
	 */
	u64 cursor_phys;
	/* In: no frame from here on. */
	u64 end_phys;
	/* In: room for so many frames. Out: frames taken. */
	u64 count;
	/* User-space address of an array of guest-physical addresses: the frames. */
	u64 frames_addr;
	/* User-space address of their content, one page after the other. */
	u64 data_addr;
	/* User-space address of an array of what MERCURY_SNAPSHOT_HASH found, or 0. */
	u64 hashes_addr;
	/*
	 * Out: 1 if the pool runs low. Whoever takes should hurry: writers have to wait
	 * soon.
	 */
	u64 low;
	/* MERCURY_TAKE_*. */
	u64 flags;
	/* Out. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_snapshot_take_request) == 96);
static_assert(offsetof(struct mercury_snapshot_take_request, header) == 0);
static_assert(offsetof(struct mercury_snapshot_take_request, cursor_phys) == 8);
static_assert(offsetof(struct mercury_snapshot_take_request, end_phys) == 16);
static_assert(offsetof(struct mercury_snapshot_take_request, count) == 24);
static_assert(offsetof(struct mercury_snapshot_take_request, frames_addr) == 32);
static_assert(offsetof(struct mercury_snapshot_take_request, data_addr) == 40);
static_assert(offsetof(struct mercury_snapshot_take_request, hashes_addr) == 48);
static_assert(offsetof(struct mercury_snapshot_take_request, low) == 56);
static_assert(offsetof(struct mercury_snapshot_take_request, flags) == 64);
static_assert(offsetof(struct mercury_snapshot_take_request, outcome) == 72);

/* What a log of writes has come to. */
struct mercury_log_request {
	/* Size and version. */
	struct mercury_header header;
	/* Out: frames that were collected. */
	u64 pages;
	/*
	 * Out: of these, those that are there only because a device may still write to
	 * them, or may have at the instant.
	 */
	u64 device_pages;
	/* Out. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_log_request) == 48);
static_assert(offsetof(struct mercury_log_request, header) == 0);
static_assert(offsetof(struct mercury_log_request, pages) == 8);
static_assert(offsetof(struct mercury_log_request, device_pages) == 16);
static_assert(offsetof(struct mercury_log_request, outcome) == 24);

/* The machine of a snapshot or of an image, without its memory's content. */
struct mercury_restart_request {
	/* Size and version. */
	struct mercury_header header;
	/* MERCURY_RESTART_*. */
	u64 flags;
	/* Address of mercury_resume in that system. */
	u64 resume_virt;
	/* Physical addresses of the page that it lies in, and of the next. */
	u64 resume_phys[2];
	/* User-space address of an array of crate::restart::RestartCpu. */
	u64 cpus_addr;
	/* User-space address of an array of crate::restart::RestartRange. */
	u64 ranges_addr;
	/*
	 * Entries at cpus_addr; where they are asked for, in: room for so many, out:
	 * how many there are.
	 */
	u32 cpus_count;
	/* Entries at ranges_addr, likewise. */
	u32 ranges_count;
	/* Out. */
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
 * Arguments of the fence. It goes by itself when the controller does, unless it is to
 * stay, and is not in the image.
 */
struct mercury_fence_request {
	/* Size and version. */
	struct mercury_header header;
	/* MERCURY_FENCE_*. */
	u64 flags;
	/*
	 * User-space address of an array of FencePeer: who may still talk to this
	 * machine.
	 */
	u64 peers_addr;
	/* Entries in it. */
	u32 peers_count;
	/* Zero. */
	u32 reserved;
	/* Out: packets that were stopped so far. */
	u64 stopped;
	/* Out. */
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

/* A peer that the fence lets through. */
struct mercury_fence_peer {
	/* Its address, in the order of the network; of IPv4 the first four bytes. */
	u8 address[16];
	/* 4 or 6. */
	u32 version;
	/* Its TCP or UDP port, or 0: all it says. */
	u32 port;
};

static_assert(sizeof(struct mercury_fence_peer) == 24);
static_assert(offsetof(struct mercury_fence_peer, address) == 0);
static_assert(offsetof(struct mercury_fence_peer, version) == 16);
static_assert(offsetof(struct mercury_fence_peer, port) == 20);

/* Arguments of loading frames. */
struct mercury_load_frames_request {
	/* Size and version. */
	struct mercury_header header;
	/* User-space address of an array of crate::restart::LoadEntry. */
	u64 entries_addr;
	/* Entries in it. */
	u64 count;
	/* User-space address of pages, one for each entry that has data. */
	u64 data_addr;
	/* Out. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_load_frames_request) == 56);
static_assert(offsetof(struct mercury_load_frames_request, header) == 0);
static_assert(offsetof(struct mercury_load_frames_request, entries_addr) == 8);
static_assert(offsetof(struct mercury_load_frames_request, count) == 16);
static_assert(offsetof(struct mercury_load_frames_request, data_addr) == 24);
static_assert(offsetof(struct mercury_load_frames_request, outcome) == 32);

/* Arguments of status. */
struct mercury_status_request {
	/* Size and version. */
	struct mercury_header header;
	/* MERCURY_STATE_*, out. */
	u32 state;
	/*
	 * In: number of entries at cpus_addr; out: entries filled (one per possible
	 * CPU).
	 */
	u32 cpus_count;
	/* User-space address of an array of CpuStatus. */
	u64 cpus_addr;
};

static_assert(sizeof(struct mercury_status_request) == 24);
static_assert(offsetof(struct mercury_status_request, header) == 0);
static_assert(offsetof(struct mercury_status_request, state) == 8);
static_assert(offsetof(struct mercury_status_request, cpus_count) == 12);
static_assert(offsetof(struct mercury_status_request, cpus_addr) == 16);

/* The mode of one CPU, as a fact asked of it, and its history. */
struct mercury_cpu_status {
	/* Linux's CPU number. */
	u32 cpu;
	/* MERCURY_MODE_*: asked of the CPU just now. */
	u32 mode;
	/* 1 if the CPU is meant to be attached. */
	u32 wanted;
	/*
	 * crate::code::Code of how it last left the hypervisor other than by a detach;
	 * 0 if it never did.
	 */
	u32 left_because;
	/* Attaches since load. */
	u64 attaches;
	/* Detaches since load. */
	u64 detaches;
	/* TSC ticks with interrupts off of the last attach. */
	u64 attach_ticks;
	/* TSC ticks with interrupts off of the last detach. */
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

/* Arguments of measure: hypercall round trips on one attached CPU with interrupts off. */
struct mercury_measure_request {
	/* Size and version. */
	struct mercury_header header;
	/* Linux's CPU number. */
	u32 cpu;
	/* Round trips, 1 to 1,000. */
	u32 count;
	/* Out: TSC ticks of all round trips together. */
	u64 ticks;
	/* Out: TSC ticks of the same loop without the hypercall. */
	u64 overhead_ticks;
	/* Out. */
	struct mercury_outcome outcome;
};

static_assert(sizeof(struct mercury_measure_request) == 56);
static_assert(offsetof(struct mercury_measure_request, header) == 0);
static_assert(offsetof(struct mercury_measure_request, cpu) == 8);
static_assert(offsetof(struct mercury_measure_request, count) == 12);
static_assert(offsetof(struct mercury_measure_request, ticks) == 16);
static_assert(offsetof(struct mercury_measure_request, overhead_ticks) == 24);
static_assert(offsetof(struct mercury_measure_request, outcome) == 32);

/* Arguments of fault injection. */
struct mercury_fault_request {
	/* Size and version. */
	struct mercury_header header;
	/* crate::gate::FaultPoint as a number; 0 disarms all. */
	u32 point;
	/* The CPU on which it fires, or u32::MAX: once on each. */
	u32 cpu;
	/* It fires at the n-th passage, counting from 1. */
	u32 passage;
	/* For crate::gate::FaultPoint::Facts: byte offset in CpuFacts, a multiple of 4. */
	u32 offset;
	/* For crate::gate::FaultPoint::Facts: the 32-bit word to put there. */
	u32 value;
	/* Zero. */
	u32 reserved;
	/* Out: how often armed points have fired since load. */
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

#endif /* __ASSEMBLY__ */

#endif /* MERCURY_ABI_H */
