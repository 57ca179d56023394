//! Names the reason that the processor refused an entry, in the words of [`mercury_abi::refusal`]. A failed
//! instruction has a number (SDM volume 3, "VM instruction error numbers"). An exit for "invalid guest
//! state" does not tell which of its checks failed ("Checks on the guest state area"). They are made here,
//! in the manual's order.

use mercury_abi::refusal::Refusal;
use mercury_preflight::bits::{cr0, cr4, efer};
use mercury_preflight::vmx::entry;

use super::Area;
use super::vmcs::{self, UNUSABLE, activity, blocking, event, reason};
use crate::msr::illegal_pat;
use crate::paging::table::Depth;
use crate::x86::{Hardware, RFLAGS_IF, RFLAGS_TF, msr::EFER_LMA, msr::EFER_LME};

const FIRST_ERROR: u64 = Refusal::NoCurrentVmcs as u64;
const HIGH: u64 = 0xFFFF_FFFF_0000_0000;
const RFLAGS_FIXED: u64 = 1 << 1;
const RFLAGS_RESERVED: u64 = 0xFFFF_FFFF_FFC0_8028;
const RFLAGS_VM: u64 = 1 << 17;
/// B3–B0, enabled breakpoint, BS, RTM.
const PENDING_DEBUG_BITS: u64 = 0xF | 1 << 12 | 1 << 14 | 1 << 16;
const PRESENT: u64 = 1 << 7;
const CODE_OR_DATA: u64 = 1 << 4;

/// Returns the refusal for a VM-instruction error; 0: there was no current VMCS.
#[must_use]
pub fn of_instruction(error: u64) -> Refusal {
    Refusal::from_number(FIRST_ERROR + error).unwrap_or(Refusal::UnknownState)
}

/// Returns the reason that the last entry was refused, and the value that the check is about.
pub fn of_entry(area: &Area, hardware: &mut impl Hardware) -> (Refusal, u64) {
    let exit = &area.own.exit;
    let reason = exit.code as u32;
    match reason & 0xFFFF {
        _ if reason & reason::INSTRUCTION_FAILED != 0 => (of_instruction(exit.info1), exit.info1),
        reason::MSR_LOADING => (Refusal::MsrLoading, exit.info1),
        reason::MACHINE_CHECK => (Refusal::MachineCheck, 0),
        _ => first(area.own.cr4_allowed, hardware),
    }
}

/// Returns the first check of the guest's state that fails.
pub fn first(cr4_allowed: u64, hardware: &mut impl Hardware) -> (Refusal, u64) {
    let guest = Guest::read(hardware);
    let checks = [
        guest.control_registers(cr4_allowed),
        guest.registers(),
        guest.efer(),
        guest.segments(hardware),
        guest.execution(),
        guest.events(hardware),
    ];
    checks.into_iter().flatten().next().unwrap_or((Refusal::UnknownState, 0))
}

type Verdict = Option<(Refusal, u64)>;

/// Returns the first condition that holds.
fn first_of<const COUNT: usize>(checks: [(bool, Refusal, u64); COUNT]) -> Verdict {
    checks.into_iter().find(|(fails, ..)| *fails).map(|(_, refusal, value)| (refusal, value))
}

/// Fields that more than one check uses.
struct Guest {
    cr0: u64,
    cr4: u64,
    cr3: u64,
    dr7: u64,
    efer: u64,
    rflags: u64,
    rip: u64,
    pat: u64,
    sysenter: [u64; 2],
    cs_rights: u64,
    long_mode: bool,
    injected: u64,
}

impl Guest {
    fn read(hardware: &mut impl Hardware) -> Self {
        let controls = hardware.vmread(vmcs::ENTRY_CONTROLS);
        Self {
            cr0: hardware.vmread(vmcs::GUEST_CR0),
            cr4: hardware.vmread(vmcs::GUEST_CR4),
            cr3: hardware.vmread(vmcs::GUEST_CR3),
            dr7: hardware.vmread(vmcs::GUEST_DR7),
            efer: hardware.vmread(vmcs::GUEST_EFER),
            rflags: hardware.vmread(vmcs::GUEST_RFLAGS),
            rip: hardware.vmread(vmcs::GUEST_RIP),
            pat: hardware.vmread(vmcs::GUEST_PAT),
            sysenter: [hardware.vmread(vmcs::GUEST_SYSENTER_ESP), hardware.vmread(vmcs::GUEST_SYSENTER_EIP)],
            cs_rights: hardware.vmread(vmcs::GUEST_CS_RIGHTS),
            long_mode: controls & u64::from(entry::IA32E_MODE_GUEST) != 0,
            injected: hardware.vmread(vmcs::ENTRY_INTERRUPTION),
        }
    }

    /// Makes the first half of "Checks on guest control registers, debug registers, and MSRs".
    fn control_registers(&self, cr4_allowed: u64) -> Verdict {
        let paging = self.cr0 & cr0::PG != 0;
        first_of([
            (self.cr0 & HIGH != 0 || self.cr0 & cr0::NE == 0, Refusal::Cr0Fixed, self.cr0),
            (paging && self.cr0 & cr0::PE == 0, Refusal::PagingWithoutProtection, self.cr0),
            (self.cr4 & !cr4_allowed != 0 || self.cr4 & cr4::VMXE == 0, Refusal::Cr4Fixed, self.cr4),
            (self.cr4 & cr4::CET != 0 && self.cr0 & cr0::WP == 0, Refusal::CetWithoutWp, self.cr0),
            (
                self.long_mode && !(paging && self.cr4 & cr4::PAE != 0),
                Refusal::LongModeWithoutPaging,
                self.cr4,
            ),
            (!self.long_mode && self.cr4 & cr4::PCIDE != 0, Refusal::PcidOutsideLongMode, self.cr4),
        ])
    }

    /// Makes the second half. Bits 62:61 of CR3 are LAM's, and bit 63 must be 0.
    fn registers(&self) -> Verdict {
        const CR3_RESERVED: u64 = 0x9FF0_0000_0000_0000;
        first_of([
            (self.cr3 & CR3_RESERVED != 0, Refusal::Cr3Width, self.cr3),
            (self.dr7 & HIGH != 0, Refusal::Dr7High, self.dr7),
            (!self.is_canonical(self.sysenter[0]), Refusal::SysenterNotCanonical, self.sysenter[0]),
            (!self.is_canonical(self.sysenter[1]), Refusal::SysenterNotCanonical, self.sysenter[1]),
            (illegal_pat(self.pat) != 0, Refusal::IllegalPat, self.pat),
        ])
    }

    fn efer(&self) -> Verdict {
        let lma = self.efer & EFER_LMA != 0;
        let paging = self.cr0 & cr0::PG != 0;
        first_of([
            (
                self.efer & !(efer::SCE | efer::LME | efer::LMA | efer::NXE) != 0,
                Refusal::EferReserved,
                self.efer,
            ),
            (lma != self.long_mode, Refusal::EferLma, self.efer),
            (paging && lma != (self.efer & EFER_LME != 0), Refusal::EferLme, self.efer),
        ])
    }

    /// Makes "Checks on guest segment registers" and "... descriptor-table registers".
    fn segments(&self, hardware: &mut impl Hardware) -> Verdict {
        let mut of = |number: u32| {
            (
                hardware.vmread(vmcs::GUEST_ES_RIGHTS + 2 * number),
                hardware.vmread(vmcs::GUEST_ES_BASE + 2 * number),
                hardware.vmread(vmcs::GUEST_ES_LIMIT + 2 * number),
            )
        };
        let all = [0, 1, 2, 3, 4, 5, 6, 7].map(&mut of);
        let [es, cs, ss, ds, fs, gs, ldtr, tr] = all;
        let usable = |rights: u64| rights & UNUSABLE == 0;
        let bad_data = |(rights, _, _): (u64, u64, u64)| {
            usable(rights) && rights & (PRESENT | CODE_OR_DATA | 1) != PRESENT | CODE_OR_DATA | 1
        };
        let bad_granularity = |(rights, _, limit): (u64, u64, u64)| {
            let fine = rights & 1 << 15 == 0;
            usable(rights) && (limit & 0xFFF != 0xFFF && !fine || limit >> 20 != 0 && fine)
        };
        let bad_code = bad_data(cs) || cs.0 & 8 == 0 && cs.0 & 15 != 3 || cs.0 & 0x6000 == 0x6000;
        let bad_stack = usable(ss.0) && !matches!(ss.0 & 15, 3 | 7)
            || usable(ss.0) && ss.0 & (PRESENT | CODE_OR_DATA) != PRESENT | CODE_OR_DATA;
        let data =
            [es, ds, fs, gs].into_iter().find(|segment| bad_data(*segment) || bad_granularity(*segment));
        let busy = if self.long_mode { tr.0 & 15 == 11 } else { matches!(tr.0 & 15, 3 | 11) };
        let bad_tr = !busy || !usable(tr.0) || tr.0 & PRESENT == 0 || tr.0 & CODE_OR_DATA != 0;
        let bad_ldtr = usable(ldtr.0) && (ldtr.0 & 0x1F != 2 || ldtr.0 & PRESENT == 0);
        let far = [fs, gs, ldtr, tr].into_iter().find(|(rights, base, _)| {
            !self.is_canonical(*base) && (usable(*rights) || *rights == fs.0 || *rights == gs.0)
        });
        let gdtr = hardware.vmread(vmcs::GUEST_GDTR_BASE);
        let idtr = hardware.vmread(vmcs::GUEST_IDTR_BASE);
        let limits = hardware.vmread(vmcs::GUEST_GDTR_LIMIT) | hardware.vmread(vmcs::GUEST_IDTR_LIMIT);
        let bad_table = !self.is_canonical(gdtr) || !self.is_canonical(idtr) || limits >> 16 != 0;
        first_of([
            (bad_code || bad_granularity(cs), Refusal::CodeSegment, cs.0),
            (bad_stack || bad_granularity(ss), Refusal::StackSegment, ss.0),
            (data.is_some(), Refusal::DataSegment, data.map_or(0, |segment| segment.0)),
            (bad_tr || bad_granularity(tr), Refusal::TaskRegister, tr.0),
            (bad_ldtr || bad_granularity(ldtr), Refusal::LdtRegister, ldtr.0),
            (far.is_some(), Refusal::SegmentBase, far.map_or(0, |segment| segment.1)),
            (bad_table, Refusal::DescriptorTable, limits),
        ])
    }

    /// Makes "Checks on guest RIP, RFLAGS, and SSP".
    fn execution(&self) -> Verdict {
        const CS_LONG: u64 = 1 << 13;
        let wide = self.long_mode && self.cs_rights & CS_LONG != 0;
        let bad_rip = if wide { !self.is_canonical(self.rip) } else { self.rip & HIGH != 0 };
        let bad_flags = self.rflags & RFLAGS_RESERVED != 0
            || self.rflags & RFLAGS_FIXED == 0
            || self.rflags & RFLAGS_VM != 0 && (self.long_mode || self.cr0 & cr0::PE == 0);
        let interrupt = self.injected & (event::VALID | event::TYPE) == event::VALID | event::EXTERNAL;
        first_of([
            (bad_rip, Refusal::Rip, self.rip),
            (bad_flags, Refusal::Rflags, self.rflags),
            (interrupt && self.rflags & RFLAGS_IF == 0, Refusal::InterruptWithoutIf, self.injected),
        ])
    }

    /// Makes "Checks on guest non-register state".
    fn events(&self, hardware: &mut impl Hardware) -> Verdict {
        let state = hardware.vmread(vmcs::GUEST_ACTIVITY);
        let blocked = hardware.vmread(vmcs::GUEST_INTERRUPTIBILITY);
        let pending = hardware.vmread(vmcs::GUEST_PENDING_DEBUG);
        let link = hardware.vmread(vmcs::VMCS_LINK_POINTER);
        let valid = self.injected & event::VALID != 0;
        let kind = self.injected & event::TYPE;
        let shadow = blocking::STI | blocking::MOV_SS;
        let bad_blocking = blocked >> 5 != 0
            || blocked & shadow == shadow
            || blocked & blocking::STI != 0 && self.rflags & RFLAGS_IF == 0
            || valid && kind == event::EXTERNAL && blocked & shadow != 0
            || valid && kind == event::NMI && blocked & blocking::MOV_SS != 0;
        let bad_state = state > activity::WAIT_FOR_SIPI || state != activity::ACTIVE && blocked & shadow != 0;
        let stepping = self.rflags & RFLAGS_TF != 0 && hardware.vmread(vmcs::GUEST_DEBUGCTL) & 1 << 1 == 0;
        let bad_pending = pending & !PENDING_DEBUG_BITS != 0
            || blocked & shadow != 0 && (pending >> 14 & 1 == 1) != stepping;
        first_of([
            (bad_state, Refusal::Activity, state),
            (bad_blocking, Refusal::Interruptibility, blocked),
            (bad_pending, Refusal::PendingDebug, pending),
            (link != u64::MAX, Refusal::LinkPointer, link),
        ])
    }

    fn is_canonical(&self, address: u64) -> bool {
        let depth = if self.cr4 & cr4::LA57 != 0 { Depth::Five } else { Depth::Four };
        let unused = 64 - depth.address_bits();
        (address << unused).cast_signed() >> unused == address.cast_signed()
    }
}
