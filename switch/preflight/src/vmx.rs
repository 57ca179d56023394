//! The controls of VMX that Mercury sets, chosen by the processor's capabilities and demands.
//!
//! The hypervisor writes the result of [`choose`] into the VMCS. The preflight refuses for the
//! reason that [`choose`] gives, so `mercury doctor` knows before. Sections are those of Intel's
//! Software Developer's Manual (SDM), volume 3: "VM-execution control fields", "VM-exit control
//! fields", "VM-entry control fields" and appendix A, "VMX capability reporting facility".

use crate::bits::{cpuid, cr4};
use mercury_abi::{code::Code, facts::CpuFacts};

/// Pin-based controls (SDM, "Pin-based VM-execution controls").
pub mod pin {
    /// NMIs exit. Set only while a snapshot is kept.
    pub const NMI_EXITING: u32 = 1 << 3;
    /// NMIs are never blocked, and the processor notes if they would be. Set with `NMI_EXITING`.
    pub const VIRTUAL_NMIS: u32 = 1 << 5;
    /// Bits 1, 2 and 4 are reserved and must be 1 (appendix A.3.1): they control nothing.
    pub const RESERVED_ONES: u32 = 1 << 1 | 1 << 2 | 1 << 4;
}

/// Primary processor-based controls (SDM, "Processor-based VM-execution controls").
pub mod primary {
    /// Exit once RFLAGS.IF is 1 and nothing blocks interrupts.
    pub const INTERRUPT_WINDOW_EXITING: u32 = 1 << 2;
    /// The tertiary controls are used.
    pub const ACTIVATE_TERTIARY: u32 = 1 << 17;
    /// Exit once the guest could take an NMI. Set only while an NMI has to wait.
    pub const NMI_WINDOW_EXITING: u32 = 1 << 22;
    /// Exit after one instruction or delivered event. Set only while an NMI has to wait.
    pub const MONITOR_TRAP_FLAG: u32 = 1 << 27;
    /// RDMSR and WRMSR exit by bitmap only.
    pub const USE_MSR_BITMAPS: u32 = 1 << 28;
    /// The secondary controls are used.
    pub const ACTIVATE_SECONDARY: u32 = 1 << 31;
    /// Bits 1, 4 to 6, 8, 13, 14 and 26 are reserved and must be 1 (appendix A.3.2): they control nothing.
    /// Bits 15 and 16, exits for each access to CR3, must be 1 only on processors without the TRUE capability
    /// MSRs: those are refused.
    pub const RESERVED_ONES: u32 = 1 << 1 | 0b111 << 4 | 1 << 8 | 0b11 << 13 | 1 << 26;
}

/// Secondary processor-based controls (the same section).
pub mod secondary {
    /// Extended page tables are used.
    pub const EPT: u32 = 1 << 1;
    /// RDTSCP and RDPID are not #UD.
    pub const RDTSCP: u32 = 1 << 3;
    /// Translations are tagged with an identifier.
    pub const VPID: u32 = 1 << 5;
    /// The guest may run without paging and in real mode: as after INIT.
    pub const UNRESTRICTED_GUEST: u32 = 1 << 7;
    /// INVPCID is not #UD.
    pub const INVPCID: u32 = 1 << 12;
    /// Processor trace does not show the hypervisor.
    pub const CONCEAL_FROM_TRACE: u32 = 1 << 19;
    /// XSAVES and XRSTORS are not #UD.
    pub const XSAVES: u32 = 1 << 20;
    /// TPAUSE, UMONITOR and UMWAIT are not #UD.
    pub const USER_WAIT: u32 = 1 << 26;
    /// PCONFIG is not #UD.
    pub const PCONFIG: u32 = 1 << 27;
}

/// Tertiary processor-based controls (the same section).
pub mod tertiary {
    /// RDMSRLIST and WRMSRLIST are not #UD.
    pub const MSR_LIST: u64 = 1 << 6;
}

/// VM-exit controls (SDM, "VM-exit controls").
pub mod exit {
    /// DR7 and IA32_DEBUGCTL are saved.
    pub const SAVE_DEBUG: u32 = 1 << 2;
    /// The hypervisor runs in 64-bit mode.
    pub const HOST_64_BIT: u32 = 1 << 9;
    /// IA32_PAT is saved at an exit.
    pub const SAVE_PAT: u32 = 1 << 18;
    /// IA32_PAT is loaded at an exit.
    pub const LOAD_PAT: u32 = 1 << 19;
    /// IA32_EFER is saved at an exit.
    pub const SAVE_EFER: u32 = 1 << 20;
    /// IA32_EFER is loaded at an exit.
    pub const LOAD_EFER: u32 = 1 << 21;
    /// Processor trace does not show the exit.
    pub const CONCEAL_FROM_TRACE: u32 = 1 << 24;
    /// S_CET, SSP and IA32_INTERRUPT_SSP_TABLE_ADDR are loaded.
    pub const LOAD_CET: u32 = 1 << 28;
    /// Bits 0, 1, 3 to 8, 10, 11, 13, 14, 16 and 17 are reserved and must be 1 (appendix A.4): they control
    /// nothing. Bit 2 must be 1 without the TRUE capability MSRs, and is wanted.
    pub const RESERVED_ONES: u32 = 0b11 | 0b11_1111 << 3 | 0b11 << 10 | 0b11 << 13 | 0b11 << 16;
}

/// VM-entry controls (SDM, "VM-entry controls").
pub mod entry {
    /// DR7 and IA32_DEBUGCTL are loaded.
    pub const LOAD_DEBUG: u32 = 1 << 2;
    /// The guest is in IA-32e mode: equal to its EFER.LMA.
    pub const IA32E_MODE_GUEST: u32 = 1 << 9;
    /// IA32_PAT is loaded at an entry.
    pub const LOAD_PAT: u32 = 1 << 14;
    /// IA32_EFER is loaded at an entry.
    pub const LOAD_EFER: u32 = 1 << 15;
    /// Processor trace does not show the entry.
    pub const CONCEAL_FROM_TRACE: u32 = 1 << 17;
    /// S_CET, SSP and IA32_INTERRUPT_SSP_TABLE_ADDR are loaded.
    pub const LOAD_CET: u32 = 1 << 20;
    /// Bits 0, 1, 3 to 8 and 12 are reserved and must be 1 (appendix A.5): they control nothing.
    pub const RESERVED_ONES: u32 = 0b11 | 0b11_1111 << 3 | 1 << 12;
}

/// IA32_VMX_EPT_VPID_CAP, MSR 48Ch (SDM volume 3, appendix A.10).
pub mod ept_vpid {
    /// Tables of four levels are possible.
    pub const WALK_4: u64 = 1 << 6;
    /// Tables of five levels are possible.
    pub const WALK_5: u64 = 1 << 7;
    /// The tables themselves are read as write-back memory.
    pub const WRITE_BACK: u64 = 1 << 14;
    /// Pages of 2 MiB are possible.
    pub const PAGE_2M: u64 = 1 << 16;
    /// Pages of 1 GiB are possible.
    pub const PAGE_1G: u64 = 1 << 17;
    /// The INVEPT instruction exists.
    pub const INVEPT: u64 = 1 << 20;
    /// INVEPT can flush all contexts.
    pub const INVEPT_ALL: u64 = 1 << 26;
    /// The INVVPID instruction exists.
    pub const INVVPID: u64 = 1 << 32;
    /// INVVPID can flush all contexts.
    pub const INVVPID_ALL: u64 = 1 << 42;

    /// Capabilities that Mercury needs. One way to invalidate is enough, and every processor with
    /// INVEPT can flush all contexts.
    pub const REQUIRED: u64 = WALK_4 | WRITE_BACK | PAGE_2M | INVEPT | INVEPT_ALL;
    /// Capabilities that the use of a VPID needs.
    pub const FOR_VPID: u64 = INVVPID | INVVPID_ALL;
}

/// IA32_VMX_BASIC, MSR 480h (SDM volume 3, appendix A.1).
pub mod basic {
    /// Revision identifier of the VMXON region and of the VMCS.
    pub const REVISION: u64 = 0x7FFF_FFFF;
    /// The VMXON region and the VMCS must lie below 4 GiB.
    pub const BELOW_4_GIB: u64 = 1 << 48;
    /// Position of the memory type for both, bits 53:50; type 6 is write-back.
    pub const TYPE_SHIFT: u32 = 50;
}

/// A word of controls.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// The pin-based controls.
    Pin = 0,
    /// Primary processor-based controls.
    Primary = 1,
    /// Secondary processor-based controls.
    Secondary = 2,
    /// Tertiary processor-based controls.
    Tertiary = 3,
    /// The controls of VM exits.
    Exit = 4,
    /// The controls of VM entries.
    Entry = 5,
}

/// The control words of a VMCS.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Controls {
    /// Pin-based controls (field 4000h of the VMCS).
    pub pin: u32,
    /// Primary processor-based controls (field 4002h).
    pub primary: u32,
    /// Secondary processor-based controls (field 401Eh).
    pub secondary: u32,
    /// VM-exit controls (field 400Ch).
    pub exit: u32,
    /// VM-entry controls (field 4012h).
    pub entry: u32,
    /// Reserved; zero, for alignment.
    pub reserved: u32,
    /// Tertiary processor-based controls (field 2034h); 0 if unused.
    pub tertiary: u64,
}

/// The reason why no legal controls exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// [`Code::VmxControlForced`], [`Code::VmxControlMissing`] or [`Code::VmxInstructionLost`].
    pub code: Code,
    /// Word that holds the control.
    pub word: Word,
    /// Bits of the word that are missing or forced.
    pub bits: u64,
}

/// The wishes for one word.
struct Wish {
    word: Word,
    /// Bits that must be 1; without them there is no attach.
    wanted: u32,
    /// Bits that are set where the processor allows them.
    optional: u32,
    /// Bits that may be 1 if the processor demands them.
    tolerated: u32,
}

impl Wish {
    /// Returns the word for its capability MSR (bits 31:0 must be 1, bits 63:32 may be 1).
    fn grant(&self, capability: u64) -> Result<u32, Refusal> {
        let (must, may) = (capability as u32, (capability >> 32) as u32);
        let missing = self.wanted & !may;
        let forced = must & !(self.wanted | self.optional | self.tolerated);
        match (missing, forced) {
            (0, 0) => Ok(self.wanted | self.optional & may | must),
            (0, bits) => Err(self.refuse(Code::VmxControlForced, bits)),
            (bits, _) => Err(self.refuse(Code::VmxControlMissing, bits)),
        }
    }

    fn refuse(&self, code: Code, bits: u32) -> Refusal {
        Refusal { code, word: self.word, bits: u64::from(bits) }
    }
}

/// Returns the controls for a processor.
///
/// Every exit that is not needed is off (all events, I/O, HLT, MWAIT, PAUSE, RDTSC, CR3, CR8, debug
/// registers: SDM, "Instructions that cause VM exits"). No instruction that the kernel has found in
/// CPUID becomes undefined.
///
/// # Errors
/// The control that is missing or forced.
pub fn choose(facts: &CpuFacts) -> Result<Controls, Refusal> {
    let tertiary = tertiary_controls(facts)?;
    let cet = cet(facts);
    let pin = Wish { word: Word::Pin, wanted: 0, optional: 0, tolerated: pin::RESERVED_ONES };
    let primary = Wish {
        word: Word::Primary,
        wanted: primary::USE_MSR_BITMAPS
            | primary::ACTIVATE_SECONDARY
            | if tertiary == 0 { 0 } else { primary::ACTIVATE_TERTIARY },
        optional: 0,
        tolerated: primary::RESERVED_ONES,
    };
    let exit = Wish {
        word: Word::Exit,
        wanted: exit::SAVE_DEBUG
            | exit::HOST_64_BIT
            | exit::SAVE_PAT
            | exit::LOAD_PAT
            | exit::SAVE_EFER
            | exit::LOAD_EFER
            | if cet { exit::LOAD_CET } else { 0 },
        optional: exit::CONCEAL_FROM_TRACE,
        tolerated: exit::RESERVED_ONES,
    };
    let entry = Wish {
        word: Word::Entry,
        wanted: entry::LOAD_DEBUG
            | entry::IA32E_MODE_GUEST
            | entry::LOAD_PAT
            | entry::LOAD_EFER
            | if cet { entry::LOAD_CET } else { 0 },
        optional: entry::CONCEAL_FROM_TRACE,
        tolerated: entry::RESERVED_ONES,
    };
    Ok(Controls {
        pin: pin.grant(facts.vmx_pin_controls)?,
        primary: primary.grant(facts.vmx_primary_controls)?,
        secondary: secondary_controls(facts)?,
        exit: exit.grant(facts.vmx_exit_controls)?,
        entry: entry.grant(facts.vmx_entry_controls)?,
        reserved: 0,
        tertiary,
    })
}

/// Returns true if exits and entries have to carry shadow-stack state: CR4.CET lets user mode have
/// it, and the kernel track its branches. Both controls are needed then (SDM, "CET state" among
/// guest and host state).
fn cet(facts: &CpuFacts) -> bool {
    facts.cr4 & cr4::CET != 0
}

/// Returns true if CPUs can be put back to a snapshot that is kept: NMIs can exit, and the system's own can
/// be given to it when it takes them. An attach does not need these controls.
#[must_use]
pub const fn can_roll_back(facts: &CpuFacts) -> bool {
    const PIN: u32 = pin::NMI_EXITING | pin::VIRTUAL_NMIS;
    const PRIMARY: u32 = primary::NMI_WINDOW_EXITING | primary::MONITOR_TRAP_FLAG;
    let (pin, primary) = (facts.vmx_pin_controls >> 32, facts.vmx_primary_controls >> 32);
    !pin as u32 & PIN == 0 && !primary as u32 & PRIMARY == 0
}

fn secondary_controls(facts: &CpuFacts) -> Result<u32, Refusal> {
    let instructions = instruction_controls(facts);
    let may = (facts.vmx_secondary_controls >> 32) as u32;
    let lost = instructions & !may;
    if lost != 0 {
        let bits = u64::from(lost);
        return Err(Refusal { code: Code::VmxInstructionLost, word: Word::Secondary, bits });
    }
    let usable_vpid = facts.vmx_ept_vpid & ept_vpid::FOR_VPID == ept_vpid::FOR_VPID;
    let vpid = if usable_vpid { secondary::VPID } else { 0 };
    let wish = Wish {
        word: Word::Secondary,
        wanted: secondary::EPT | secondary::UNRESTRICTED_GUEST | instructions,
        optional: vpid | secondary::CONCEAL_FROM_TRACE,
        tolerated: 0,
    };
    wish.grant(facts.vmx_secondary_controls)
}

/// Returns the controls without which an instruction that CPUID announces would be #UD (HARDWARE
/// I-6).
fn instruction_controls(facts: &CpuFacts) -> u32 {
    let has = |leaf: u32, bit: u32, control: u32| if leaf & bit != 0 { control } else { 0 };
    has(facts.cpuid_8000_0001.edx, cpuid::EXT1_EDX_RDTSCP, secondary::RDTSCP)
        | has(facts.cpuid_7_0.ecx, cpuid::LEAF7_ECX_RDPID, secondary::RDTSCP)
        | has(facts.cpuid_7_0.ebx, cpuid::LEAF7_EBX_INVPCID, secondary::INVPCID)
        | has(facts.cpuid_d_1.eax, cpuid::LEAFD1_EAX_XSAVES, secondary::XSAVES)
        | has(facts.cpuid_7_0.ecx, cpuid::LEAF7_ECX_WAITPKG, secondary::USER_WAIT)
        | has(facts.cpuid_7_0.edx, cpuid::LEAF7_EDX_PCONFIG, secondary::PCONFIG)
}

/// Returns the tertiary controls of the same kind. Fails for an instruction whose control is
/// unknown here.
fn tertiary_controls(facts: &CpuFacts) -> Result<u64, Refusal> {
    let lost = |bits| Refusal { code: Code::VmxInstructionLost, word: Word::Tertiary, bits };
    if facts.cpuid_7_1.edx & cpuid::LEAF71_EDX_USER_MSR != 0 {
        return Err(lost(0));
    }
    let lists = facts.cpuid_7_1.eax & cpuid::LEAF71_EAX_MSRLIST != 0;
    let wanted = if lists { tertiary::MSR_LIST } else { 0 };
    let missing = wanted & !facts.vmx_tertiary_controls;
    if missing != 0 { Err(lost(missing)) } else { Ok(wanted) }
}
