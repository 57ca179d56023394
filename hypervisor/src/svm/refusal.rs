//! Which of VMRUN's checks a control block fails (APM vol. 2, 15.5.1, "Canonicalization and
//! consistency checks"). The processor only says that it refuses; this names the reason.

use super::vmcb::Vmcb;
use crate::x86::msr::{EFER_LME, EFER_SVME};

/// A check of VMRUN. The numbers are the first detail of
/// [`mercury_abi::code::Code::InvalidGuestState`].
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// None that is known here fails.
    Unknown = 0,
    /// EFER.SVME is clear.
    SvmeClear = 1,
    /// CR0.CD is clear and CR0.NW is set.
    Cr0NwWithoutCd = 2,
    /// CR0 bits 63:32 are not zero.
    Cr0High = 3,
    /// Reserved bits of CR3 are set.
    Cr3Reserved = 4,
    /// Reserved bits of CR4 are set.
    Cr4Reserved = 5,
    /// DR6 bits 63:32 are not zero.
    Dr6High = 6,
    /// DR7 bits 63:32 are not zero.
    Dr7High = 7,
    /// Reserved bits of EFER are set.
    EferReserved = 8,
    /// EFER.LME and CR0.PG are set and CR4.PAE is clear.
    LongModeWithoutPae = 9,
    /// EFER.LME and CR0.PG are set and CR0.PE is clear.
    LongModeWithoutPe = 10,
    /// EFER.LME, CR0.PG, CR4.PAE, CS.L and CS.D are all set.
    CodeSegmentLAndD = 11,
    /// The VMRUN intercept is clear.
    VmrunNotIntercepted = 12,
    /// The address-space identifier is zero.
    AsidZero = 13,
    /// The event to inject is not a legal one.
    IllegalEvent = 14,
    /// The guest's PAT holds an illegal type.
    IllegalPat = 15,
}

const CR0_PE: u64 = 1;
const CR0_NW: u64 = 1 << 29;
const CR0_CD: u64 = 1 << 30;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const VMRUN: u32 = 1;
const HIGH: u64 = 0xFFFF_FFFF_0000_0000;
const ATTRIBUTE_L_AND_D: u16 = 0x600;

/// The first check, in the manual's order, that `control` fails.
#[must_use]
pub fn first(control: &Vmcb) -> Check {
    let long_mode = control.efer & EFER_LME != 0 && control.cr0 & CR0_PG != 0;
    let failing = [
        (control.efer & EFER_SVME == 0, Check::SvmeClear),
        (control.cr0 & CR0_CD == 0 && control.cr0 & CR0_NW != 0, Check::Cr0NwWithoutCd),
        (control.cr0 & HIGH != 0, Check::Cr0High),
        (control.cr3 >> 52 & !(3 << 9) != 0, Check::Cr3Reserved),
        (control.cr4 & !mercury_preflight::bits::cr4::KNOWN != 0, Check::Cr4Reserved),
        (control.dr6 & HIGH != 0, Check::Dr6High),
        (control.dr7 & HIGH != 0, Check::Dr7High),
        (control.efer & !(mercury_preflight::bits::efer::KNOWN | EFER_SVME) != 0, Check::EferReserved),
        (long_mode && control.cr4 & CR4_PAE == 0, Check::LongModeWithoutPae),
        (long_mode && control.cr0 & CR0_PE == 0, Check::LongModeWithoutPe),
        (
            long_mode && control.cs.attributes & ATTRIBUTE_L_AND_D == ATTRIBUTE_L_AND_D,
            Check::CodeSegmentLAndD,
        ),
        (control.intercept_misc2 & VMRUN == 0, Check::VmrunNotIntercepted),
        (control.asid == 0, Check::AsidZero),
        (illegal_event(control.inject_event), Check::IllegalEvent),
        (control.g_pat.to_le_bytes().iter().any(|entry| !matches!(entry, 0 | 1 | 4..=7)), Check::IllegalPat),
    ];
    failing.iter().find(|(fails, _)| *fails).map_or(Check::Unknown, |(_, check)| *check)
}

fn illegal_event(event: u64) -> bool {
    use super::vmcb::event::{EXCEPTION, TYPE, VALID};
    let vector = event & 0xFF;
    let kind = event & TYPE;
    event & VALID != 0
        && (matches!(kind >> 8, 1 | 5..=7) || kind == EXCEPTION && (vector == 2 || vector > 31))
}

/// The value that `check` looks at: the second detail.
#[must_use]
pub fn value(control: &Vmcb, check: Check) -> u64 {
    match check {
        Check::Unknown => 0,
        Check::SvmeClear | Check::EferReserved => control.efer,
        Check::Cr0NwWithoutCd | Check::Cr0High | Check::LongModeWithoutPe => control.cr0,
        Check::Cr3Reserved => control.cr3,
        Check::Cr4Reserved | Check::LongModeWithoutPae => control.cr4,
        Check::Dr6High => control.dr6,
        Check::Dr7High => control.dr7,
        Check::CodeSegmentLAndD => u64::from(control.cs.attributes),
        Check::VmrunNotIntercepted => u64::from(control.intercept_misc2),
        Check::AsidZero => u64::from(control.asid),
        Check::IllegalEvent => control.inject_event,
        Check::IllegalPat => control.g_pat,
    }
}
