//! The virtual machine control structure (SDM volume 3, chapter "Virtual machine control structures", and
//! appendix B for the encodings of its fields).
//!
//! Its memory is the processor's: only the revision identifier is written there, everything else by VMWRITE.
//! What Mercury sets is set at each attach, for a fresh VMCS holds anything; what has no name here belongs to a
//! control that is 0.

/// The control page: revision identifier, abort indicator, and what the processor keeps.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Vmcs {
    /// VMCS revision identifier; bit 31, the shadow indicator, is 0.
    pub revision: u32,
    /// Why a VM exit ended in shutdown, if one did.
    pub abort: u32,
    data: [u8; 4088],
}

const _: () = assert!(size_of::<Vmcs>() == 4096);

macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident = $encoding:literal;)*) => {
        $($(#[$doc])* pub const $name: u32 = $encoding;)*

        /// Every field that has a name.
        #[cfg(test)]
        pub const ALL: &[(u32, &str)] = &[$(($name, stringify!($name)),)*];
    };
}

fields! {
    /// Virtual-processor identifier, not 0.
    VPID = 0x0000;
    /// Guest ES selector; CS, SS, DS, FS, GS, LDTR and TR follow in steps of 2.
    GUEST_ES_SELECTOR = 0x0800;
    /// Guest CS selector.
    GUEST_CS_SELECTOR = 0x0802;
    /// Guest SS selector.
    GUEST_SS_SELECTOR = 0x0804;
    /// Guest DS selector.
    GUEST_DS_SELECTOR = 0x0806;
    /// Guest FS selector.
    GUEST_FS_SELECTOR = 0x0808;
    /// Guest GS selector.
    GUEST_GS_SELECTOR = 0x080A;
    /// Guest LDTR selector.
    GUEST_LDTR_SELECTOR = 0x080C;
    /// Guest TR selector.
    GUEST_TR_SELECTOR = 0x080E;
    /// Host ES selector.
    HOST_ES_SELECTOR = 0x0C00;
    /// Host CS selector.
    HOST_CS_SELECTOR = 0x0C02;
    /// Host SS selector.
    HOST_SS_SELECTOR = 0x0C04;
    /// Host DS selector.
    HOST_DS_SELECTOR = 0x0C06;
    /// Host FS selector.
    HOST_FS_SELECTOR = 0x0C08;
    /// Host GS selector.
    HOST_GS_SELECTOR = 0x0C0A;
    /// Host TR selector.
    HOST_TR_SELECTOR = 0x0C0C;
    /// Host-physical address of the MSR bitmap.
    MSR_BITMAP = 0x2004;
    /// Added to the TSC where a control says so: none does.
    TSC_OFFSET = 0x2010;
    /// EPT pointer: root, memory type, levels less 1.
    EPT_POINTER = 0x201A;
    /// XSAVES exits by this bitmap: 0.
    XSS_EXITING_BITMAP = 0x202C;
    /// Tertiary processor-based controls.
    TERTIARY_CONTROLS = 0x2034;
    /// PCONFIG exits by this bitmap: 0.
    PCONFIG_EXITING_BITMAP = 0x203E;
    /// Where an EPT violation was.
    GUEST_PHYSICAL_ADDRESS = 0x2400;
    /// VMCS link pointer: all ones.
    VMCS_LINK_POINTER = 0x2800;
    /// Guest IA32_DEBUGCTL.
    GUEST_DEBUGCTL = 0x2802;
    /// Guest IA32_PAT.
    GUEST_PAT = 0x2804;
    /// Guest IA32_EFER.
    GUEST_EFER = 0x2806;
    /// Host IA32_PAT.
    HOST_PAT = 0x2C00;
    /// Host IA32_EFER.
    HOST_EFER = 0x2C02;
    /// Pin-based controls.
    PIN_CONTROLS = 0x4000;
    /// Primary processor-based controls.
    PRIMARY_CONTROLS = 0x4002;
    /// Exceptions that exit: none.
    EXCEPTION_BITMAP = 0x4004;
    /// Page faults that exit, mask.
    PAGE_FAULT_MASK = 0x4006;
    /// Page faults that exit, match.
    PAGE_FAULT_MATCH = 0x4008;
    /// Number of CR3 targets.
    CR3_TARGET_COUNT = 0x400A;
    /// VM-exit controls.
    EXIT_CONTROLS = 0x400C;
    /// MSRs stored at an exit: none.
    EXIT_MSR_STORE_COUNT = 0x400E;
    /// MSRs loaded at an exit: none.
    EXIT_MSR_LOAD_COUNT = 0x4010;
    /// VM-entry controls.
    ENTRY_CONTROLS = 0x4012;
    /// MSRs loaded at an entry: none.
    ENTRY_MSR_LOAD_COUNT = 0x4014;
    /// Event to inject; the processor clears its valid bit at each exit.
    ENTRY_INTERRUPTION = 0x4016;
    /// Its error code.
    ENTRY_ERROR_CODE = 0x4018;
    /// Secondary processor-based controls.
    SECONDARY_CONTROLS = 0x401E;
    /// Why a VMX instruction failed.
    VM_INSTRUCTION_ERROR = 0x4400;
    /// Why the guest was left.
    EXIT_REASON = 0x4402;
    /// Event that was being delivered.
    VECTORING = 0x4408;
    /// Its error code.
    VECTORING_ERROR_CODE = 0x440A;
    /// Length of the instruction that exited.
    EXIT_INSTRUCTION_LENGTH = 0x440C;
    /// Guest ES limit; the other segments follow in steps of 2.
    GUEST_ES_LIMIT = 0x4800;
    /// Guest LDTR limit.
    GUEST_LDTR_LIMIT = 0x480C;
    /// Guest TR limit.
    GUEST_TR_LIMIT = 0x480E;
    /// Guest GDTR limit.
    GUEST_GDTR_LIMIT = 0x4810;
    /// Guest IDTR limit.
    GUEST_IDTR_LIMIT = 0x4812;
    /// Guest ES access rights; the other segments follow in steps of 2.
    GUEST_ES_RIGHTS = 0x4814;
    /// Guest CS access rights.
    GUEST_CS_RIGHTS = 0x4816;
    /// Guest SS access rights: its DPL is the CPL.
    GUEST_SS_RIGHTS = 0x4818;
    /// Guest LDTR access rights.
    GUEST_LDTR_RIGHTS = 0x4820;
    /// Guest TR access rights.
    GUEST_TR_RIGHTS = 0x4822;
    /// What blocks events in the guest.
    GUEST_INTERRUPTIBILITY = 0x4824;
    /// Whether the guest runs, halts or waits.
    GUEST_ACTIVITY = 0x4826;
    /// Guest SYSENTER_CS.
    GUEST_SYSENTER_CS = 0x482A;
    /// Host SYSENTER_CS.
    HOST_SYSENTER_CS = 0x4C00;
    /// Bits of CR0 that are the hypervisor's.
    CR0_MASK = 0x6000;
    /// Bits of CR4 that are the hypervisor's.
    CR4_MASK = 0x6002;
    /// What the guest reads of those of CR0.
    CR0_SHADOW = 0x6004;
    /// What the guest reads of those of CR4.
    CR4_SHADOW = 0x6006;
    /// Particulars of an exit.
    EXIT_QUALIFICATION = 0x6400;
    /// Guest CR0.
    GUEST_CR0 = 0x6800;
    /// Guest CR3.
    GUEST_CR3 = 0x6802;
    /// Guest CR4.
    GUEST_CR4 = 0x6804;
    /// Guest ES base; the other segments follow in steps of 2.
    GUEST_ES_BASE = 0x6806;
    /// Guest FS base.
    GUEST_FS_BASE = 0x680E;
    /// Guest GS base.
    GUEST_GS_BASE = 0x6810;
    /// Guest LDTR base.
    GUEST_LDTR_BASE = 0x6812;
    /// Guest TR base.
    GUEST_TR_BASE = 0x6814;
    /// Guest GDTR base.
    GUEST_GDTR_BASE = 0x6816;
    /// Guest IDTR base.
    GUEST_IDTR_BASE = 0x6818;
    /// Guest DR7.
    GUEST_DR7 = 0x681A;
    /// Guest RSP.
    GUEST_RSP = 0x681C;
    /// Guest RIP.
    GUEST_RIP = 0x681E;
    /// Guest RFLAGS.
    GUEST_RFLAGS = 0x6820;
    /// Debug exceptions that wait.
    GUEST_PENDING_DEBUG = 0x6822;
    /// Guest SYSENTER_ESP.
    GUEST_SYSENTER_ESP = 0x6824;
    /// Guest SYSENTER_EIP.
    GUEST_SYSENTER_EIP = 0x6826;
    /// Guest S_CET.
    GUEST_S_CET = 0x6828;
    /// Guest SSP.
    GUEST_SSP = 0x682A;
    /// Guest IA32_INTERRUPT_SSP_TABLE_ADDR.
    GUEST_INTERRUPT_SSP_TABLE = 0x682C;
    /// Host CR0.
    HOST_CR0 = 0x6C00;
    /// Host CR3.
    HOST_CR3 = 0x6C02;
    /// Host CR4.
    HOST_CR4 = 0x6C04;
    /// Host FS base.
    HOST_FS_BASE = 0x6C06;
    /// Host GS base.
    HOST_GS_BASE = 0x6C08;
    /// Host TR base.
    HOST_TR_BASE = 0x6C0A;
    /// Host GDTR base.
    HOST_GDTR_BASE = 0x6C0C;
    /// Host IDTR base.
    HOST_IDTR_BASE = 0x6C0E;
    /// Host SYSENTER_ESP.
    HOST_SYSENTER_ESP = 0x6C10;
    /// Host SYSENTER_EIP.
    HOST_SYSENTER_EIP = 0x6C12;
    /// Host RSP.
    HOST_RSP = 0x6C14;
    /// Host RIP.
    HOST_RIP = 0x6C16;
    /// Host S_CET.
    HOST_S_CET = 0x6C18;
    /// Host SSP.
    HOST_SSP = 0x6C1A;
    /// Host IA32_INTERRUPT_SSP_TABLE_ADDR.
    HOST_INTERRUPT_SSP_TABLE = 0x6C1C;
}

/// Access rights of a segment that cannot be used.
pub const UNUSABLE: u64 = 1 << 16;
/// The VPID of the guest; 0 is root operation's.
pub const GUEST_VPID: u64 = 1;

/// Exit reasons (SDM volume 3, appendix C), bits 15:0.
pub mod reason {
    /// Triple fault.
    pub const TRIPLE_FAULT: u32 = 2;
    /// INIT.
    pub const INIT: u32 = 3;
    /// Start-up IPI.
    pub const SIPI: u32 = 4;
    /// The guest can take interrupts.
    pub const INTERRUPT_WINDOW: u32 = 7;
    /// CPUID.
    pub const CPUID: u32 = 10;
    /// GETSEC.
    pub const GETSEC: u32 = 11;
    /// INVD.
    pub const INVD: u32 = 13;
    /// VMCALL.
    pub const VMCALL: u32 = 18;
    /// VMCLEAR; then VMLAUNCH, VMPTRLD, VMPTRST, VMREAD, VMRESUME, VMWRITE.
    pub const VMCLEAR: u32 = 19;
    /// VMWRITE.
    pub const VMWRITE: u32 = 25;
    /// VMXOFF.
    pub const VMXOFF: u32 = 26;
    /// VMXON.
    pub const VMXON: u32 = 27;
    /// Access to a control register.
    pub const CONTROL_REGISTER: u32 = 28;
    /// RDMSR.
    pub const RDMSR: u32 = 31;
    /// WRMSR.
    pub const WRMSR: u32 = 32;
    /// The entry failed: invalid guest state.
    pub const INVALID_STATE: u32 = 33;
    /// The entry failed: MSR loading.
    pub const MSR_LOADING: u32 = 34;
    /// Monitor trap flag.
    pub const MONITOR_TRAP: u32 = 37;
    /// The entry failed: machine check.
    pub const MACHINE_CHECK: u32 = 41;
    /// EPT violation.
    pub const EPT_VIOLATION: u32 = 48;
    /// INVEPT.
    pub const INVEPT: u32 = 50;
    /// INVVPID.
    pub const INVVPID: u32 = 53;
    /// XSETBV.
    pub const XSETBV: u32 = 55;
    /// Bit 31: the entry failed.
    pub const ENTRY_FAILED: u32 = 1 << 31;
    /// Not the processor's: VMLAUNCH or VMRESUME itself failed, and did not exit.
    pub const INSTRUCTION_FAILED: u32 = 1 << 30;
}

/// Events, in [`ENTRY_INTERRUPTION`] and [`VECTORING`] (SDM, "VM-entry controls for event injection").
pub mod event {
    pub use crate::event::*;

    /// Type 5: privileged software exception (INT1).
    pub const PRIVILEGED: u64 = 5 << 8;
    /// Type 6: software exception (INT3, INTO).
    pub const SOFTWARE_EXCEPTION: u64 = 6 << 8;
    /// An NMI to inject.
    pub const INJECT_NMI: u64 = VALID | NMI | 2;
}

/// Interruptibility state (SDM, "Guest non-register state").
pub mod blocking {
    /// By STI.
    pub const STI: u64 = 1 << 0;
    /// By MOV SS or POP SS.
    pub const MOV_SS: u64 = 1 << 1;
    /// NMIs are blocked.
    pub const NMI: u64 = 1 << 3;
}

/// Activity states (SDM, "Guest non-register state").
pub mod activity {
    /// The guest executes instructions.
    pub const ACTIVE: u64 = 0;
    /// It waits for a start-up IPI.
    pub const WAIT_FOR_SIPI: u64 = 3;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodings say width and kind (SDM volume 3, "VMCS-field encoding"): a slip in a digit shows.
    #[test]
    fn encodings_are_of_their_kind() {
        for (field, name) in ALL {
            let (width, kind) = (field >> 13, field >> 10 & 3);
            assert_eq!(field & 1, 0, "{name} is an access to the upper half");
            assert_eq!(
                name.starts_with("GUEST_") && *field != GUEST_PHYSICAL_ADDRESS,
                kind == 2 && !["VMCS_LINK_POINTER"].contains(name),
                "{name}"
            );
            assert_eq!(name.starts_with("HOST_"), kind == 3, "{name}");
            let expected = match name {
                name if name.ends_with("_SELECTOR") || *name == "VPID" => 0,
                name if name.ends_with("_BASE") || name.contains("_CR") || name.contains("_RIP") => 3,
                name if name.contains("LIMIT") || name.contains("RIGHTS") => 2,
                name if ["PAT", "EFER", "DEBUGCTL"].iter().any(|end| name.ends_with(end)) => 1,
                _ => width,
            };
            let is_control = name.starts_with("CR3_TARGET");
            assert!(is_control || width == expected, "{name}");
        }
        let mut numbers: Vec<_> = ALL.iter().map(|(field, _)| field).collect();
        numbers.sort();
        numbers.dedup();
        assert_eq!(numbers.len(), ALL.len());
    }
}
