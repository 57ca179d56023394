//! Names the check of VMRUN that a control block fails (APM vol. 2, 15.5.1, "Canonicalization and
//! consistency checks"). The processor reports only that it refuses.

use mercury_preflight::bits::{cr4, efer};

use super::vmcb::Vmcb;
use crate::msr::illegal_pat;
use crate::x86::msr::{EFER_LME, EFER_SVME};

/// A check of VMRUN. The numbers are the first detail of
/// [`mercury_abi::code::Code::InvalidGuestState`].
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// None that is known here fails.
    Unknown = 0,
    /// EFER.SVME is clear in the block.
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
/// Bits 63:52 of CR3 but for 62:61, which hold LAM.
const CR3_RESERVED: u64 = 0x9FF0_0000_0000_0000;
const HIGH: u64 = 0xFFFF_FFFF_0000_0000;
const ATTRIBUTE_L_AND_D: u16 = 0x600;

/// Returns true if VMRUN will take `control`. It makes all checks at once, for every entry.
#[inline]
#[must_use]
pub fn none(control: &Vmcb) -> bool {
    let wrong_bits = control.cr0 & HIGH
        | control.cr3 & CR3_RESERVED
        | control.cr4 & !cr4::KNOWN
        | control.dr6 & HIGH
        | control.dr7 & HIGH
        | control.efer & !(efer::KNOWN | EFER_SVME)
        | illegal_pat(control.g_pat);
    let required = control.efer & EFER_SVME != 0 && control.intercept_misc2 & VMRUN != 0 && control.asid != 0;
    wrong_bits == 0
        && required
        && control.cr0 & (CR0_CD | CR0_NW) != CR0_NW
        && (!is_long_mode(control) || long_mode_is_legal(control))
        && !illegal_event(control.inject_event)
}

/// Returns true if the only fault is a bit of CR4 that is not known here.
#[must_use]
pub fn is_foreign(control: &Vmcb) -> bool {
    control.cr4 & !cr4::KNOWN != 0 && checks(control).iter().filter(|(fails, _)| *fails).count() == 1
}

const fn is_long_mode(control: &Vmcb) -> bool {
    control.efer & EFER_LME != 0 && control.cr0 & CR0_PG != 0
}

const fn long_mode_is_legal(control: &Vmcb) -> bool {
    control.cr4 & CR4_PAE != 0
        && control.cr0 & CR0_PE != 0
        && control.cs.attributes & ATTRIBUTE_L_AND_D != ATTRIBUTE_L_AND_D
}

/// Returns the first check, in the manual's order, that `control` fails.
#[must_use]
pub fn first(control: &Vmcb) -> Check {
    checks(control).iter().find(|(fails, _)| *fails).map_or(Check::Unknown, |(_, check)| *check)
}

/// Returns every check in the manual's order, with true if it fails.
fn checks(control: &Vmcb) -> [(bool, Check); 15] {
    let long_mode = is_long_mode(control);
    [
        (control.efer & EFER_SVME == 0, Check::SvmeClear),
        (control.cr0 & CR0_CD == 0 && control.cr0 & CR0_NW != 0, Check::Cr0NwWithoutCd),
        (control.cr0 & HIGH != 0, Check::Cr0High),
        (control.cr3 & CR3_RESERVED != 0, Check::Cr3Reserved),
        (control.cr4 & !cr4::KNOWN != 0, Check::Cr4Reserved),
        (control.dr6 & HIGH != 0, Check::Dr6High),
        (control.dr7 & HIGH != 0, Check::Dr7High),
        (control.efer & !(efer::KNOWN | EFER_SVME) != 0, Check::EferReserved),
        (long_mode && control.cr4 & CR4_PAE == 0, Check::LongModeWithoutPae),
        (long_mode && control.cr0 & CR0_PE == 0, Check::LongModeWithoutPe),
        (
            long_mode && control.cs.attributes & ATTRIBUTE_L_AND_D == ATTRIBUTE_L_AND_D,
            Check::CodeSegmentLAndD,
        ),
        (control.intercept_misc2 & VMRUN == 0, Check::VmrunNotIntercepted),
        (control.asid == 0, Check::AsidZero),
        (illegal_event(control.inject_event), Check::IllegalEvent),
        (illegal_pat(control.g_pat) != 0, Check::IllegalPat),
    ]
}

fn illegal_event(event: u64) -> bool {
    use super::vmcb::event::{EXCEPTION, TYPE, VALID};
    let vector = event & 0xFF;
    let kind = event & TYPE;
    event & VALID != 0
        && (matches!(kind >> 8, 1 | 5..=7) || kind == EXCEPTION && (vector == 2 || vector > 31))
}

/// Returns the value that `check` is about: the second detail.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn legal() -> Box<Vmcb> {
        let mut control = Vmcb::zeroed();
        control.efer = 0x1D01;
        control.cr0 = 0x8005_0033;
        control.cr4 = 0x6F0;
        control.asid = 1;
        control.intercept_misc2 = VMRUN;
        control.cs.attributes = 0x29B;
        control.g_pat = 0x0407_0506_0007_0106;
        control
    }

    #[test]
    fn a_legal_block_passes() {
        assert_eq!(first(&legal()), Check::Unknown);
        assert!(none(&legal()));
    }

    #[test]
    fn every_type_of_memory_is_judged() {
        for value in 0u8..=255 {
            let legal = matches!(value, 0 | 1 | 4..=7);
            for position in 0..8 {
                assert_eq!(
                    illegal_pat(u64::from(value) << (8 * position)) == 0,
                    legal,
                    "{value} at {position}"
                );
            }
        }
    }

    proptest! {
        /// The quick answer and the one with a name agree, whatever is wrong.
        #[test]
        fn both_answers_agree(field in 0usize..10, bits in any::<u64>(), flip in 0u32..64) {
            let mut control = legal();
            let changed = |old: u64| if bits & 1 == 0 { old ^ 1 << flip } else { bits };
            match field {
                0 => control.cr0 = changed(control.cr0),
                1 => control.cr3 = changed(control.cr3),
                2 => control.cr4 = changed(control.cr4),
                3 => control.efer = changed(control.efer),
                4 => control.dr6 = changed(control.dr6),
                5 => control.dr7 = changed(control.dr7),
                6 => control.g_pat = changed(control.g_pat),
                7 => control.inject_event = changed(control.inject_event),
                8 => control.cs.attributes = changed(u64::from(control.cs.attributes)) as u16,
                _ => control.asid = changed(1) as u32,
            }
            prop_assert_eq!(none(&control), first(&control) == Check::Unknown);
        }
    }
}
