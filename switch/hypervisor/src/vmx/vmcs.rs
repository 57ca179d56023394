//! The virtual machine control structure (SDM volume 3, chapter "Virtual machine control structures", whose
//! sections are named below, and appendix B for the encodings).
//!
//! The memory belongs to the processor. Software writes the revision identifier there, and everything else
//! by VMWRITE. A fresh VMCS holds anything, so each attach sets all the fields that Mercury uses. Fields
//! without a name here belong to a control that is 0.

/// The control page: revision identifier, abort indicator, and what the processor keeps.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Vmcs {
    /// VMCS revision identifier; bit 31, the shadow indicator, is 0.
    pub revision: u32,
    /// VMX-abort indicator: the reason that a VM exit ended in shutdown, if one did.
    pub abort: u32,
    data: [u8; 4088],
}

const _: () = assert!(size_of::<Vmcs>() == 4096);

macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident = $encoding:literal;)*) => {
        $($(#[$doc])* pub const $name: u32 = $encoding;)*

        /// Fields that have a name, with that.
        #[cfg(test)]
        pub const ALL: &[(u32, &str)] = &[$(($name, stringify!($name)),)*];
    };
}

fields! {
    /// Virtual-processor identifier, 16 bits, not 0 ("Virtual-processor identifier").
    VPID = 0x0000;
    /// Guest ES selector, 16 bits ("Guest register state"). CS, SS, DS, FS, GS, LDTR and TR follow in steps
    /// of 2.
    GUEST_ES_SELECTOR = 0x0800;
    /// Guest CS selector, 16 bits ("Guest register state").
    GUEST_CS_SELECTOR = 0x0802;
    /// Guest SS selector, 16 bits ("Guest register state").
    GUEST_SS_SELECTOR = 0x0804;
    /// Guest DS selector, 16 bits ("Guest register state").
    GUEST_DS_SELECTOR = 0x0806;
    /// Guest FS selector, 16 bits ("Guest register state").
    GUEST_FS_SELECTOR = 0x0808;
    /// Guest GS selector, 16 bits ("Guest register state").
    GUEST_GS_SELECTOR = 0x080A;
    /// Guest LDTR selector, 16 bits ("Guest register state").
    GUEST_LDTR_SELECTOR = 0x080C;
    /// Guest TR selector, 16 bits ("Guest register state").
    GUEST_TR_SELECTOR = 0x080E;
    /// Host ES selector, 16 bits ("Host-state area").
    HOST_ES_SELECTOR = 0x0C00;
    /// Host CS selector, 16 bits ("Host-state area").
    HOST_CS_SELECTOR = 0x0C02;
    /// Host SS selector, 16 bits ("Host-state area").
    HOST_SS_SELECTOR = 0x0C04;
    /// Host DS selector, 16 bits ("Host-state area").
    HOST_DS_SELECTOR = 0x0C06;
    /// Host FS selector, 16 bits ("Host-state area").
    HOST_FS_SELECTOR = 0x0C08;
    /// Host GS selector, 16 bits ("Host-state area").
    HOST_GS_SELECTOR = 0x0C0A;
    /// Host TR selector, 16 bits ("Host-state area").
    HOST_TR_SELECTOR = 0x0C0C;
    /// Host-physical address of the MSR bitmaps, 4 KiB ("MSR-bitmap address").
    MSR_BITMAP = 0x2004;
    /// TSC offset in ticks, added where a control says so: none does ("Time-stamp counter offset").
    TSC_OFFSET = 0x2010;
    /// EPT pointer: host-physical root, memory type, levels less 1 ("Extended-page-table pointer").
    EPT_POINTER = 0x201A;
    /// Bitmap of the components for which XSAVES exits: 0 ("XSS-exiting bitmap").
    XSS_EXITING_BITMAP = 0x202C;
    /// Tertiary processor-based controls, 64 bits ("Processor-based VM-execution controls").
    TERTIARY_CONTROLS = 0x2034;
    /// Bitmap of the leaves for which PCONFIG exits: 0 ("PCONFIG-exiting bitmap").
    PCONFIG_EXITING_BITMAP = 0x203E;
    /// Guest-physical address of an EPT violation ("Basic VM-exit information").
    GUEST_PHYSICAL_ADDRESS = 0x2400;
    /// VMCS link pointer: all ones, for no shadow VMCS ("Guest non-register state").
    VMCS_LINK_POINTER = 0x2800;
    /// Guest IA32_DEBUGCTL, 64 bits ("Guest register state").
    GUEST_DEBUGCTL = 0x2802;
    /// Guest IA32_PAT, 64 bits ("Guest register state").
    GUEST_PAT = 0x2804;
    /// Guest IA32_EFER, 64 bits ("Guest register state").
    GUEST_EFER = 0x2806;
    /// Host IA32_PAT, 64 bits ("Host-state area").
    HOST_PAT = 0x2C00;
    /// Host IA32_EFER, 64 bits ("Host-state area").
    HOST_EFER = 0x2C02;
    /// Pin-based controls, 32 bits ("Pin-based VM-execution controls").
    PIN_CONTROLS = 0x4000;
    /// Primary processor-based controls, 32 bits ("Processor-based VM-execution controls").
    PRIMARY_CONTROLS = 0x4002;
    /// Bitmap of the exceptions that exit, by vector: 0 ("Exception bitmap").
    EXCEPTION_BITMAP = 0x4004;
    /// Mask of page-fault error codes that exit ("Exception bitmap").
    PAGE_FAULT_MASK = 0x4006;
    /// Match of page-fault error codes that exit ("Exception bitmap").
    PAGE_FAULT_MATCH = 0x4008;
    /// Number of CR3-target values, with which MOV to CR3 does not exit ("CR3-target controls").
    CR3_TARGET_COUNT = 0x400A;
    /// VM-exit controls, 32 bits ("VM-exit controls").
    EXIT_CONTROLS = 0x400C;
    /// Number of MSRs stored at an exit: 0 ("VM-exit controls for MSRs").
    EXIT_MSR_STORE_COUNT = 0x400E;
    /// Number of MSRs loaded at an exit: 0 ("VM-exit controls for MSRs").
    EXIT_MSR_LOAD_COUNT = 0x4010;
    /// VM-entry controls, 32 bits ("VM-entry controls").
    ENTRY_CONTROLS = 0x4012;
    /// Number of MSRs loaded at an entry: 0 ("VM-entry controls for MSRs").
    ENTRY_MSR_LOAD_COUNT = 0x4014;
    /// VM-entry interruption information: the event to inject. The processor clears its valid bit at each
    /// exit ("VM-entry controls for event injection").
    ENTRY_INTERRUPTION = 0x4016;
    /// VM-entry exception error code, of the event to inject.
    ENTRY_ERROR_CODE = 0x4018;
    /// Secondary processor-based controls, 32 bits ("Processor-based VM-execution controls").
    SECONDARY_CONTROLS = 0x401E;
    /// VM-instruction error: the reason that a VMX instruction failed ("VM instruction error numbers").
    VM_INSTRUCTION_ERROR = 0x4400;
    /// Exit reason ([`reason`]; "Basic VM-exit information").
    EXIT_REASON = 0x4402;
    /// IDT-vectoring information: the event that was being delivered ("Information for VM exits that occur
    /// during event delivery").
    VECTORING = 0x4408;
    /// IDT-vectoring error code, of the event that was being delivered.
    VECTORING_ERROR_CODE = 0x440A;
    /// Length of the instruction that exited, in bytes.
    EXIT_INSTRUCTION_LENGTH = 0x440C;
    /// Guest ES limit in bytes ("Guest register state"). The other segments follow in steps of 2.
    GUEST_ES_LIMIT = 0x4800;
    /// Guest LDTR limit in bytes, 32 bits ("Guest register state").
    GUEST_LDTR_LIMIT = 0x480C;
    /// Guest TR limit in bytes, 32 bits ("Guest register state").
    GUEST_TR_LIMIT = 0x480E;
    /// Guest GDTR limit in bytes, 32 bits ("Guest register state").
    GUEST_GDTR_LIMIT = 0x4810;
    /// Guest IDTR limit in bytes, 32 bits ("Guest register state").
    GUEST_IDTR_LIMIT = 0x4812;
    /// Guest ES access rights ("Guest register state"). The other segments follow in steps of 2.
    GUEST_ES_RIGHTS = 0x4814;
    /// Guest CS access rights, 32 bits ("Guest register state"; bit 16 is [`UNUSABLE`]).
    GUEST_CS_RIGHTS = 0x4816;
    /// Guest SS access rights ("Guest register state"). The DPL is the CPL.
    GUEST_SS_RIGHTS = 0x4818;
    /// Guest LDTR access rights, 32 bits ("Guest register state"; bit 16 is [`UNUSABLE`]).
    GUEST_LDTR_RIGHTS = 0x4820;
    /// Guest TR access rights, 32 bits ("Guest register state"; bit 16 is [`UNUSABLE`]).
    GUEST_TR_RIGHTS = 0x4822;
    /// Interruptibility state: events that are blocked ([`blocking`]; "Guest non-register state").
    GUEST_INTERRUPTIBILITY = 0x4824;
    /// Activity state: running, halted or waiting ([`activity`]; "Guest non-register state").
    GUEST_ACTIVITY = 0x4826;
    /// Guest IA32_SYSENTER_CS, 32 bits ("Guest register state").
    GUEST_SYSENTER_CS = 0x482A;
    /// Host IA32_SYSENTER_CS, 32 bits ("Host-state area").
    HOST_SYSENTER_CS = 0x4C00;
    /// Guest/host mask of CR0: bits that the hypervisor owns ("Guest/host masks and read shadows").
    CR0_MASK = 0x6000;
    /// Guest/host mask of CR4: bits that the hypervisor owns ("Guest/host masks and read shadows").
    CR4_MASK = 0x6002;
    /// Read shadow of CR0: values of the owned bits that the guest reads.
    CR0_SHADOW = 0x6004;
    /// Read shadow of CR4: values of the owned bits that the guest reads.
    CR4_SHADOW = 0x6006;
    /// Exit qualification; its layout depends on the reason ("Exit qualification").
    EXIT_QUALIFICATION = 0x6400;
    /// Guest CR0, natural width ("Guest register state").
    GUEST_CR0 = 0x6800;
    /// Guest CR3: guest-physical root of its page tables ("Guest register state").
    GUEST_CR3 = 0x6802;
    /// Guest CR4, natural width ("Guest register state").
    GUEST_CR4 = 0x6804;
    /// Guest ES base, virtual ("Guest register state"). The other segments follow in steps of 2.
    GUEST_ES_BASE = 0x6806;
    /// Guest FS base, virtual ("Guest register state").
    GUEST_FS_BASE = 0x680E;
    /// Guest GS base, virtual ("Guest register state").
    GUEST_GS_BASE = 0x6810;
    /// Guest LDTR base, virtual ("Guest register state").
    GUEST_LDTR_BASE = 0x6812;
    /// Guest TR base, virtual ("Guest register state").
    GUEST_TR_BASE = 0x6814;
    /// Guest GDTR base, virtual ("Guest register state").
    GUEST_GDTR_BASE = 0x6816;
    /// Guest IDTR base, virtual ("Guest register state").
    GUEST_IDTR_BASE = 0x6818;
    /// Guest DR7, loaded and saved by two controls ("Guest register state").
    GUEST_DR7 = 0x681A;
    /// Guest RSP, virtual ("Guest register state").
    GUEST_RSP = 0x681C;
    /// Guest RIP, virtual: at an exit the address of the instruction that exited ("Guest register state").
    GUEST_RIP = 0x681E;
    /// Guest RFLAGS, natural width ("Guest register state").
    GUEST_RFLAGS = 0x6820;
    /// Pending debug exceptions ("Guest non-register state").
    GUEST_PENDING_DEBUG = 0x6822;
    /// Guest IA32_SYSENTER_ESP, virtual ("Guest register state").
    GUEST_SYSENTER_ESP = 0x6824;
    /// Guest IA32_SYSENTER_EIP, virtual ("Guest register state").
    GUEST_SYSENTER_EIP = 0x6826;
    /// Guest IA32_S_CET, in force with the control "load CET state" ("Guest register state").
    GUEST_S_CET = 0x6828;
    /// Guest shadow-stack pointer, virtual ("Guest register state").
    GUEST_SSP = 0x682A;
    /// Guest IA32_INTERRUPT_SSP_TABLE_ADDR, virtual ("Guest register state").
    GUEST_INTERRUPT_SSP_TABLE = 0x682C;
    /// Host CR0, natural width ("Host-state area").
    HOST_CR0 = 0x6C00;
    /// Host CR3: host-physical root of the hypervisor's page tables ("Host-state area").
    HOST_CR3 = 0x6C02;
    /// Host CR4, natural width ("Host-state area").
    HOST_CR4 = 0x6C04;
    /// Host FS base, virtual ("Host-state area").
    HOST_FS_BASE = 0x6C06;
    /// Host GS base, virtual ("Host-state area").
    HOST_GS_BASE = 0x6C08;
    /// Host TR base, virtual ("Host-state area").
    HOST_TR_BASE = 0x6C0A;
    /// Host GDTR base, virtual ("Host-state area").
    HOST_GDTR_BASE = 0x6C0C;
    /// Host IDTR base, virtual ("Host-state area").
    HOST_IDTR_BASE = 0x6C0E;
    /// Host IA32_SYSENTER_ESP, virtual ("Host-state area").
    HOST_SYSENTER_ESP = 0x6C10;
    /// Host IA32_SYSENTER_EIP, virtual ("Host-state area").
    HOST_SYSENTER_EIP = 0x6C12;
    /// Host RSP, virtual: the stack of an exit ("Host-state area").
    HOST_RSP = 0x6C14;
    /// Host RIP, virtual: the first instruction of an exit ("Host-state area").
    HOST_RIP = 0x6C16;
    /// Host IA32_S_CET ("Host-state area").
    HOST_S_CET = 0x6C18;
    /// Host shadow-stack pointer, virtual ("Host-state area").
    HOST_SSP = 0x6C1A;
    /// Host IA32_INTERRUPT_SSP_TABLE_ADDR, virtual ("Host-state area").
    HOST_INTERRUPT_SSP_TABLE = 0x6C1C;
}

/// Access-rights bit of a segment that cannot be used.
pub const UNUSABLE: u64 = 1 << 16;
/// VPID of the guest. Root operation has 0.
pub const GUEST_VPID: u64 = 1;

/// Exit reasons (SDM volume 3, appendix C), bits 15:0.
pub mod reason {
    /// NMI arrived, or an exception of the bitmap struck: there is none.
    pub const NMI: u32 = 0;
    /// Triple fault in the guest.
    pub const TRIPLE_FAULT: u32 = 2;
    /// INIT signal arrived.
    pub const INIT: u32 = 3;
    /// Start-up IPI arrived in the wait-for-SIPI state.
    pub const SIPI: u32 = 4;
    /// The guest can take interrupts ("interrupt window").
    pub const INTERRUPT_WINDOW: u32 = 7;
    /// The guest can take an NMI ("NMI window").
    pub const NMI_WINDOW: u32 = 8;
    /// Guest executed CPUID.
    pub const CPUID: u32 = 10;
    /// Guest executed GETSEC.
    pub const GETSEC: u32 = 11;
    /// Guest executed INVD.
    pub const INVD: u32 = 13;
    /// Guest executed VMCALL.
    pub const VMCALL: u32 = 18;
    /// Guest executed VMCLEAR. VMLAUNCH, VMPTRLD, VMPTRST, VMREAD and VMRESUME follow.
    pub const VMCLEAR: u32 = 19;
    /// Guest executed VMWRITE.
    pub const VMWRITE: u32 = 25;
    /// Guest executed VMXOFF.
    pub const VMXOFF: u32 = 26;
    /// Guest executed VMXON.
    pub const VMXON: u32 = 27;
    /// Access to a control register (MOV CR, CLTS, LMSW).
    pub const CONTROL_REGISTER: u32 = 28;
    /// Guest executed RDMSR.
    pub const RDMSR: u32 = 31;
    /// Guest executed WRMSR.
    pub const WRMSR: u32 = 32;
    /// VM-entry failure: invalid guest state.
    pub const INVALID_STATE: u32 = 33;
    /// VM-entry failure: MSR loading.
    pub const MSR_LOADING: u32 = 34;
    /// Monitor trap flag: a single step.
    pub const MONITOR_TRAP: u32 = 37;
    /// VM-entry failure: machine-check event.
    pub const MACHINE_CHECK: u32 = 41;
    /// EPT violation: the nested tables do not permit an access.
    pub const EPT_VIOLATION: u32 = 48;
    /// Guest executed INVEPT.
    pub const INVEPT: u32 = 50;
    /// Guest executed INVVPID.
    pub const INVVPID: u32 = 53;
    /// Guest executed XSETBV.
    pub const XSETBV: u32 = 55;
    /// Bit 31: the entry failed, and the guest has not run.
    pub const ENTRY_FAILED: u32 = 1 << 31;
    /// Mercury's own code, none of the processor's: VMLAUNCH or VMRESUME failed as an instruction, without an
    /// exit.
    pub const INSTRUCTION_FAILED: u32 = 1 << 30;
}

/// Events, in [`ENTRY_INTERRUPTION`] and [`VECTORING`] (SDM, "VM-entry controls for event injection").
pub mod event {
    pub use crate::event::*;

    /// Type 5: privileged software exception (INT1).
    pub const PRIVILEGED: u64 = 5 << 8;
    /// Type 6: software exception (INT3, INTO).
    pub const SOFTWARE_EXCEPTION: u64 = 6 << 8;
    /// Event: an NMI to inject.
    pub const INJECT_NMI: u64 = VALID | NMI | 2;
}

/// Interruptibility state (SDM, "Guest non-register state").
pub mod blocking {
    /// Blocking by STI, for one instruction.
    pub const STI: u64 = 1 << 0;
    /// Blocking by MOV SS or POP SS, for one instruction.
    pub const MOV_SS: u64 = 1 << 1;
    /// Blocking by NMI, until IRET.
    pub const NMI: u64 = 1 << 3;
}

/// Activity states (SDM, "Guest non-register state").
pub mod activity {
    /// The guest executes instructions.
    pub const ACTIVE: u64 = 0;
    /// The CPU waits for an event, after HLT.
    pub const HALTED: u64 = 1;
    /// The CPU waits for a start-up IPI.
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
