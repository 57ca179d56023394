//! Why VMX refused to enter a guest, in numbers and in words: the first detail of
//! [`crate::code::Code::InvalidGuestState`] on Intel. Section names are those of the Software Developer's
//! Manual, volume 3.

macro_rules! refusals {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal;)*) => {
        /// A reason. Numbers below 1,000 are AMD's and named by the hypervisor alone; 1,000 and the
        /// VM-instruction error: VMLAUNCH, VMRESUME or what prepared them failed; from 1,100 on: a check of
        /// the guest's state, or what the exit said instead.
        #[repr(u64)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Refusal { $($(#[$doc])* $name = $number,)* }

        impl Refusal {
            /// Every reason, in numerical order.
            pub const ALL: &'static [Refusal] = &[$(Refusal::$name,)*];

            /// The reason in words, without a full stop.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self { $(Refusal::$name => $text,)* }
            }

            /// The reason with this number, if there is one.
            #[must_use]
            pub const fn from_number(number: u64) -> Option<Refusal> {
                match number { $($number => Some(Refusal::$name),)* _ => None }
            }
        }
    };
}

refusals! {
    /// VMfailInvalid: there is no error number then ("Conventions").
    NoCurrentVmcs = 1000, "there is no current VMCS";
    /// Error 1 ("VM instruction error numbers", as all up to 28).
    VmcallInRoot = 1001, "VMCALL executed in VMX root operation";
    /// Error 2.
    VmclearAddress = 1002, "VMCLEAR with an invalid physical address";
    /// Error 3.
    VmclearVmxon = 1003, "VMCLEAR with the VMXON pointer";
    /// Error 4.
    VmlaunchNotClear = 1004, "VMLAUNCH with a VMCS that is not clear";
    /// Error 5.
    VmresumeNotLaunched = 1005, "VMRESUME with a VMCS that is not launched";
    /// Error 6.
    VmresumeAfterVmxoff = 1006, "VMRESUME after VMXOFF";
    /// Error 7.
    InvalidControls = 1007, "VM entry with invalid control fields";
    /// Error 8.
    InvalidHostState = 1008, "VM entry with invalid host-state fields";
    /// Error 9.
    VmptrldAddress = 1009, "VMPTRLD with an invalid physical address";
    /// Error 10.
    VmptrldVmxon = 1010, "VMPTRLD with the VMXON pointer";
    /// Error 11.
    VmptrldRevision = 1011, "VMPTRLD with an incorrect VMCS revision identifier";
    /// Error 12.
    UnsupportedField = 1012, "access to a VMCS field that is not supported";
    /// Error 13.
    ReadOnlyField = 1013, "VMWRITE to a read-only VMCS field";
    /// Error 15.
    VmxonInRoot = 1015, "VMXON executed in VMX root operation";
    /// Error 16.
    InvalidExecutivePointer = 1016, "VM entry with an invalid executive-VMCS pointer";
    /// Error 17.
    ExecutiveNotLaunched = 1017, "VM entry with a non-launched executive VMCS";
    /// Error 18.
    ExecutiveNotVmxon = 1018, "VM entry with an executive-VMCS pointer that is not the VMXON pointer";
    /// Error 19.
    DualMonitorNotClear = 1019, "VMCALL with a VMCS that is not clear";
    /// Error 20.
    DualMonitorExitControls = 1020, "VMCALL with invalid VM-exit control fields";
    /// Error 22.
    DualMonitorRevision = 1022, "VMCALL with an incorrect MSEG revision identifier";
    /// Error 23.
    VmxoffDualMonitor = 1023, "VMXOFF under dual-monitor treatment of SMIs";
    /// Error 24.
    DualMonitorFeatures = 1024, "VMCALL with invalid SMM-monitor features";
    /// Error 25.
    DualMonitorEntryControls = 1025, "VM entry with invalid VM-execution control fields in the executive VMCS";
    /// Error 26.
    BlockedByMovSs = 1026, "VM entry with events blocked by MOV SS";
    /// Error 28.
    InvalidOperand = 1028, "invalid operand to INVEPT or INVVPID";
    /// VMXON itself failed or faulted.
    VmxonFailed = 1099, "VMXON failed";

    /// The exit says that the guest's state is invalid, and none of the checks below fails ("Checks on the
    /// guest state area", as all that follow).
    UnknownState = 1100, "the guest's state is invalid; no known check fails";
    /// The exit says that an MSR to be loaded was refused; none is.
    MsrLoading = 1101, "an MSR to be loaded was refused";
    /// The exit says that a machine check struck during the entry.
    MachineCheck = 1102, "a machine check during VM entry";
    /// A bit of CR0 that VMX fixes.
    Cr0Fixed = 1110, "CR0 has a bit that VMX does not allow";
    /// CR0.PG without CR0.PE.
    PagingWithoutProtection = 1111, "CR0.PG is set and CR0.PE is not";
    /// A bit of CR4 that VMX fixes.
    Cr4Fixed = 1112, "CR4 has a bit that VMX does not allow";
    /// CR4.CET without CR0.WP.
    CetWithoutWp = 1113, "CR4.CET is set and CR0.WP is not";
    /// The IA-32e-mode control without paging or PAE.
    LongModeWithoutPaging = 1114, "IA-32e mode without CR0.PG or CR4.PAE";
    /// CR4.PCIDE outside of IA-32e mode.
    PcidOutsideLongMode = 1115, "CR4.PCIDE is set outside of IA-32e mode";
    /// CR3 beyond the physical address width.
    Cr3Width = 1116, "CR3 holds bits above the physical address width";
    /// DR7 bits 63:32.
    Dr7High = 1117, "DR7 has bits above 31";
    /// SYSENTER_ESP or SYSENTER_EIP is not canonical.
    SysenterNotCanonical = 1118, "a SYSENTER address is not canonical";
    /// The PAT holds an illegal type.
    IllegalPat = 1119, "the PAT holds an illegal memory type";
    /// EFER holds a reserved bit.
    EferReserved = 1120, "EFER holds a reserved bit";
    /// EFER.LMA is not equal to the IA-32e-mode control.
    EferLma = 1121, "EFER.LMA differs from the IA-32e-mode control";
    /// EFER.LMA and EFER.LME differ while CR0.PG is set.
    EferLme = 1122, "EFER.LMA and EFER.LME differ while paging is on";
    /// Access rights of CS.
    CodeSegment = 1123, "CS is not a present code segment of the right mode";
    /// Access rights of SS, or its RPL.
    StackSegment = 1124, "SS is not what CS demands";
    /// Access rights of DS, ES, FS or GS.
    DataSegment = 1125, "a data segment is neither usable nor marked unusable";
    /// TR.
    TaskRegister = 1126, "TR is not a busy task-state segment";
    /// LDTR.
    LdtRegister = 1127, "LDTR is neither an LDT nor marked unusable";
    /// A segment's base.
    SegmentBase = 1128, "a segment's base address is not canonical";
    /// GDTR or IDTR.
    DescriptorTable = 1129, "GDTR or IDTR has an illegal base or limit";
    /// RIP.
    Rip = 1130, "RIP is not canonical, or too large for its mode";
    /// RFLAGS.
    Rflags = 1131, "RFLAGS has an illegal bit";
    /// IF is clear with an external interrupt to inject.
    InterruptWithoutIf = 1132, "an interrupt is to be injected and RFLAGS.IF is clear";
    /// Activity state.
    Activity = 1133, "the activity state is illegal, or contradicts the event to inject";
    /// Interruptibility state.
    Interruptibility = 1134, "the interruptibility state is illegal, or contradicts the event to inject";
    /// Pending debug exceptions.
    PendingDebug = 1135, "the pending debug exceptions contradict RFLAGS.TF";
    /// VMCS link pointer.
    LinkPointer = 1136, "the VMCS link pointer is not all ones";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lead_back() {
        let mut last = 0;
        for refusal in Refusal::ALL {
            assert!(*refusal as u64 > last);
            last = *refusal as u64;
            assert_eq!(Refusal::from_number(last), Some(*refusal));
            assert!(!refusal.text().ends_with('.'));
        }
        assert_eq!(Refusal::from_number(1014), None);
    }
}
