//! The reasons why VMX refuses to enter a guest, as numbers and as text: the first detail of
//! [`crate::code::Code::InvalidGuestState`] on Intel. Section names are those of the Software
//! Developer's Manual, volume 3.

macro_rules! refusals {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal;)*) => {
        /// The reason of a refusal, by the range of its number:
        ///
        /// - below 1,000: AMD's reasons, which the hypervisor alone names;
        /// - 1,000 plus the VM-instruction error: VMLAUNCH, VMRESUME or their preparation failed;
        /// - from 1,100 on: a failed check of the guest's state, or the exit's own reason.
        #[repr(u64)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Refusal { $($(#[$doc])* $name = $number,)* }

        impl Refusal {
            /// Every reason, in numerical order.
            pub const ALL: &'static [Refusal] = &[$(Refusal::$name,)*];

            /// Returns the reason as text, without a full stop.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self { $(Refusal::$name => $text,)* }
            }

            /// Returns the reason with this number, if there is one.
            #[must_use]
            pub const fn from_number(number: u64) -> Option<Refusal> {
                match number { $($number => Some(Refusal::$name),)* _ => None }
            }
        }
    };
}

refusals! {
    /// VMfailInvalid: the processor gives no error number ("Conventions").
    NoCurrentVmcs = 1000, "there is no current VMCS";
    /// VM-instruction error 1 ("VM instruction error numbers", as all up to 28).
    VmcallInRoot = 1001, "VMCALL executed in VMX root operation";
    /// VM-instruction error 2.
    VmclearAddress = 1002, "VMCLEAR with an invalid physical address";
    /// VM-instruction error 3.
    VmclearVmxon = 1003, "VMCLEAR with the VMXON pointer";
    /// VM-instruction error 4.
    VmlaunchNotClear = 1004, "VMLAUNCH with a VMCS that is not clear";
    /// VM-instruction error 5.
    VmresumeNotLaunched = 1005, "VMRESUME with a VMCS that is not launched";
    /// VM-instruction error 6.
    VmresumeAfterVmxoff = 1006, "VMRESUME after VMXOFF";
    /// VM-instruction error 7.
    InvalidControls = 1007, "VM entry with invalid control fields";
    /// VM-instruction error 8.
    InvalidHostState = 1008, "VM entry with invalid host-state fields";
    /// VM-instruction error 9.
    VmptrldAddress = 1009, "VMPTRLD with an invalid physical address";
    /// VM-instruction error 10.
    VmptrldVmxon = 1010, "VMPTRLD with the VMXON pointer";
    /// VM-instruction error 11.
    VmptrldRevision = 1011, "VMPTRLD with an incorrect VMCS revision identifier";
    /// VM-instruction error 12.
    UnsupportedField = 1012, "access to a VMCS field that is not supported";
    /// VM-instruction error 13.
    ReadOnlyField = 1013, "VMWRITE to a read-only VMCS field";
    /// VM-instruction error 15.
    VmxonInRoot = 1015, "VMXON executed in VMX root operation";
    /// VM-instruction error 16.
    InvalidExecutivePointer = 1016, "VM entry with an invalid executive-VMCS pointer";
    /// VM-instruction error 17.
    ExecutiveNotLaunched = 1017, "VM entry with a non-launched executive VMCS";
    /// VM-instruction error 18.
    ExecutiveNotVmxon = 1018, "VM entry with an executive-VMCS pointer that is not the VMXON pointer";
    /// VM-instruction error 19.
    DualMonitorNotClear = 1019, "VMCALL with a VMCS that is not clear";
    /// VM-instruction error 20.
    DualMonitorExitControls = 1020, "VMCALL with invalid VM-exit control fields";
    /// VM-instruction error 22.
    DualMonitorRevision = 1022, "VMCALL with an incorrect MSEG revision identifier";
    /// VM-instruction error 23.
    VmxoffDualMonitor = 1023, "VMXOFF under dual-monitor treatment of SMIs";
    /// VM-instruction error 24.
    DualMonitorFeatures = 1024, "VMCALL with invalid SMM-monitor features";
    /// VM-instruction error 25.
    DualMonitorEntryControls = 1025, "VM entry with invalid VM-execution control fields in the executive \
        VMCS";
    /// VM-instruction error 26.
    BlockedByMovSs = 1026, "VM entry with events blocked by MOV SS";
    /// VM-instruction error 28.
    InvalidOperand = 1028, "invalid operand to INVEPT or INVVPID";
    /// VMXON itself failed or faulted.
    VmxonFailed = 1099, "VMXON failed";

    /// The exit reports an invalid guest state, and none of the checks below fails ("Checks on the
    /// guest state area", as all that follow).
    UnknownState = 1100, "the guest's state is invalid; no known check fails";
    /// The exit reports a refused MSR of the load list, and the hypervisor finds none that is
    /// refused.
    MsrLoading = 1101, "an MSR to be loaded was refused";
    /// The exit reports a machine check during the entry.
    MachineCheck = 1102, "a machine check during VM entry";
    /// CR0 violates a bit that VMX fixes.
    Cr0Fixed = 1110, "CR0 has a bit that VMX does not allow";
    /// CR0.PG is set without CR0.PE.
    PagingWithoutProtection = 1111, "CR0.PG is set and CR0.PE is not";
    /// CR4 violates a bit that VMX fixes.
    Cr4Fixed = 1112, "CR4 has a bit that VMX does not allow";
    /// CR4.CET is set without CR0.WP.
    CetWithoutWp = 1113, "CR4.CET is set and CR0.WP is not";
    /// The IA-32e-mode control is set without paging or PAE.
    LongModeWithoutPaging = 1114, "IA-32e mode without CR0.PG or CR4.PAE";
    /// CR4.PCIDE is set outside of IA-32e mode.
    PcidOutsideLongMode = 1115, "CR4.PCIDE is set outside of IA-32e mode";
    /// CR3 has bits above the physical address width.
    Cr3Width = 1116, "CR3 holds bits above the physical address width";
    /// DR7 has a bit of 63:32 set.
    Dr7High = 1117, "DR7 has bits above 31";
    /// SYSENTER_ESP or SYSENTER_EIP is not canonical.
    SysenterNotCanonical = 1118, "a SYSENTER address is not canonical";
    /// The PAT holds an illegal memory type.
    IllegalPat = 1119, "the PAT holds an illegal memory type";
    /// EFER has a reserved bit set.
    EferReserved = 1120, "EFER holds a reserved bit";
    /// EFER.LMA is not equal to the IA-32e-mode control.
    EferLma = 1121, "EFER.LMA differs from the IA-32e-mode control";
    /// EFER.LMA and EFER.LME differ while CR0.PG is set.
    EferLme = 1122, "EFER.LMA and EFER.LME differ while paging is on";
    /// The access rights of CS are illegal.
    CodeSegment = 1123, "CS is not a present code segment of the right mode";
    /// The access rights of SS, or its RPL, are illegal.
    StackSegment = 1124, "SS is not what CS demands";
    /// The access rights of DS, ES, FS or GS are illegal.
    DataSegment = 1125, "a data segment is neither usable nor marked unusable";
    /// TR is unusable, or not a busy task-state segment.
    TaskRegister = 1126, "TR is not a busy task-state segment";
    /// LDTR is usable, and not an LDT.
    LdtRegister = 1127, "LDTR is neither an LDT nor marked unusable";
    /// The base of a segment is not canonical.
    SegmentBase = 1128, "a segment's base address is not canonical";
    /// GDTR or IDTR has a base that is not canonical, or a limit above FFFFh.
    DescriptorTable = 1129, "GDTR or IDTR has an illegal base or limit";
    /// RIP is not canonical, or too large for its mode.
    Rip = 1130, "RIP is not canonical, or too large for its mode";
    /// RFLAGS has a reserved bit, or VM in IA-32e mode.
    Rflags = 1131, "RFLAGS has an illegal bit";
    /// RFLAGS.IF is clear with an external interrupt to inject.
    InterruptWithoutIf = 1132, "an interrupt is to be injected and RFLAGS.IF is clear";
    /// The activity state is illegal, or contradicts the event to inject.
    Activity = 1133, "the activity state is illegal, or contradicts the event to inject";
    /// The interruptibility state is illegal, or contradicts the event to inject.
    Interruptibility = 1134, "the interruptibility state is illegal, or contradicts the event to inject";
    /// The pending debug exceptions contradict RFLAGS.TF.
    PendingDebug = 1135, "the pending debug exceptions contradict RFLAGS.TF";
    /// The VMCS link pointer is not all ones.
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
