//! MSRs of the guest: the writes that exit, and their meaning.
//!
//! EFER, PAT, DEBUGCTL and SYSENTER need no interception: entries and exits load and save them. Writes of
//! these are intercepted:
//!
//! * the MTRRs, whose types the nested tables repeat (HARDWARE I-17),
//! * the microcode trigger (L-11),
//! * IA32_PEBS_ENABLE, whose records would go through the hypervisor's page tables.
//!
//! The processor also exits by itself for all MSRs outside of the bitmap's two ranges (SDM volume 3,
//! "MSR-bitmap address"). Those are executed for real (I-30).

use mercury_abi::code::Code;
use mercury_abi::shared::ExitReason;

use mercury_preflight::bits::cr0;

use super::capture::CR0_NE;
use super::{Area, Vmx, vmcs};
use crate::exit::{Answer, Fault};
use crate::msr::{log_access, read_through, write_through};
use crate::mtrr::DEFAULT_ENABLE;
use crate::x86::{Hardware, msr};
use crate::{nested, publish};

/// The MSR bitmap (SDM volume 3, "MSR-bitmap address"): reads of the low and the high range, then writes.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Bitmap([u8; 4096]);

/// Bitmap, which all CPUs share.
pub static BITMAP: Bitmap = Bitmap::new()
    .intercept_write(msr::MICROCODE_TRIGGER)
    .intercept_write(msr::PEBS_ENABLE)
    .intercept_write(msr::MTRR_DEF_TYPE)
    .intercept_writes(msr::MTRR_PHYS_BASE0, 2 * crate::mtrr::MAX_VARIABLE as u32)
    .intercept_fixed_ranges();

impl Bitmap {
    const WRITES: usize = 2048;

    const fn new() -> Self {
        Self([0; 4096])
    }

    const fn intercept_write(mut self, index: u32) -> Self {
        let range = match index {
            0..=0x1FFF => Self::WRITES,
            0xC000_0000..=0xC000_1FFF => Self::WRITES + 1024,
            _ => panic!("outside the bitmap: always intercepted"),
        };
        let position = (index & 0x1FFF) as usize;
        self.0[range + position / 8] |= 1 << (position % 8);
        self
    }

    const fn intercept_writes(mut self, first: u32, count: u32) -> Self {
        let mut index = first;
        while index < first + count {
            self = self.intercept_write(index);
            index += 1;
        }
        self
    }

    const fn intercept_fixed_ranges(mut self) -> Self {
        let mut number = 0;
        while number < msr::MTRR_FIXED.len() {
            self = self.intercept_write(msr::MTRR_FIXED[number]);
            number += 1;
        }
        self
    }
}

/// Answers a read of an MSR that exits.
pub fn read(area: &mut Area, hardware: &mut impl Hardware, index: u32) -> Answer {
    publish::count(area, ExitReason::MsrPassThrough);
    read_through(area, hardware, index)
}

/// Answers a write of an MSR that exits.
pub fn write(area: &mut Area, hardware: &mut impl Hardware, index: u32, value: u64) -> Answer {
    let (reason, answer) = match index {
        _ if area.own.foreign != 0 => (ExitReason::MsrPassThrough, write_foreign(hardware, index, value)),
        msr::MICROCODE_TRIGGER => (ExitReason::MsrMicrocode, Answer::Depart(Code::MicrocodeUpdate)),
        msr::PEBS_ENABLE if value != 0 => (ExitReason::MsrPassThrough, Answer::Depart(Code::DebugStore)),
        msr::MTRR_DEF_TYPE => (ExitReason::MsrPassThrough, write_default_type(hardware, value)),
        _ if is_mtrr(index) => (ExitReason::MsrPassThrough, write_mtrr(hardware, index, value)),
        _ => (ExitReason::MsrPassThrough, write_through(hardware, index, value)),
    };
    publish::count(area, reason);
    log_access(area, hardware, index, value, true, answer == Answer::Inject(Fault::GeneralProtection));
    answer
}

fn is_mtrr(index: u32) -> bool {
    let variable = msr::MTRR_PHYS_BASE0..msr::MTRR_PHYS_BASE0 + 2 * crate::mtrr::MAX_VARIABLE as u32;
    index == msr::MTRR_DEF_TYPE || variable.contains(&index) || msr::MTRR_FIXED.contains(&index)
}

/// Answers a write of an MTRR. A value that is there already changes nothing: Linux writes the same ones on
/// each CPU that comes online. Any other makes the tables wrong. The CPU then leaves and writes it
/// natively, and is not attached again until the tables have been built afresh.
fn write_mtrr(hardware: &mut impl Hardware, index: u32, value: u64) -> Answer {
    match hardware.read_msr(index) {
        Some(current) if current == value => Answer::Skip,
        Some(_) => Answer::Depart(Code::MtrrChanged),
        None => Answer::Inject(Fault::GeneralProtection),
    }
}

/// Answers a write of MTRRdefType. A system writes its MTRRs with caches disabled, and clears E meanwhile.
/// Linux does so on every CPU after a suspend and a hibernation, even if all values stay the same.
///
/// With CR0.CD set every access is uncacheable, whatever nested tables and MTRRs say (SDM volume 3, "Memory
/// type used for translated guest-physical addresses"). So the tables are compared with the MTRRs only when
/// E comes back. Until then clearing CR0.CD exits: see [`disables_mtrrs`].
fn write_default_type(hardware: &mut impl Hardware, value: u64) -> Answer {
    let Some(current) = hardware.read_msr(msr::MTRR_DEF_TYPE) else {
        return Answer::Inject(Fault::GeneralProtection);
    };
    let (was_on, is_on) = (current & DEFAULT_ENABLE != 0, value & DEFAULT_ENABLE != 0);
    let without_caches = hardware.vmread(vmcs::GUEST_CR0) & cr0::CD != 0;
    if current == value || was_on == is_on || !without_caches {
        return write_mtrr(hardware, msr::MTRR_DEF_TYPE, value);
    }
    if !hardware.write_msr(msr::MTRR_DEF_TYPE, value) {
        return Answer::Inject(Fault::GeneralProtection);
    }
    if is_on && !nested::types_are_current::<Vmx>(hardware) {
        return Answer::Depart(Code::MtrrChanged);
    }
    watch_caches(hardware, !is_on);
    Answer::Skip
}

/// Has a write to CR0 exit that clears CD, or lets it be native again.
pub fn watch_caches(hardware: &mut impl Hardware, wanted: bool) {
    let own = hardware.vmread(vmcs::CR0_SHADOW) & CR0_NE;
    let seen = hardware.vmread(vmcs::GUEST_CR0) & !CR0_NE | own;
    hardware.vmwrite(vmcs::CR0_SHADOW, seen);
    hardware.vmwrite(vmcs::CR0_MASK, if wanted { CR0_NE | cr0::CD } else { CR0_NE });
}

/// Returns true if this value of CR0 enables the caches while the system has its MTRRs disabled: natively
/// all of memory would be uncacheable, and beneath the hypervisor it would not.
pub fn disables_mtrrs(hardware: &mut impl Hardware, cr0: u64) -> bool {
    hardware.vmread(vmcs::CR0_MASK) & cr0::CD != 0 && cr0 & cr0::CD == 0
}

/// Answers a write of another kernel, beneath which the hypervisor has to stay. Its MTRRs are those that it
/// found, but for the time in which it writes them. The nested tables keep their types. The kernel gets no
/// new microcode and no records of samples.
fn write_foreign(hardware: &mut impl Hardware, index: u32, value: u64) -> Answer {
    match index {
        msr::MICROCODE_TRIGGER => Answer::Skip,
        msr::PEBS_ENABLE if value != 0 => Answer::Inject(Fault::GeneralProtection),
        _ => write_through(hardware, index, value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bitmap_holds_what_the_manual_says_and_nothing_else() {
        let written = |index: u32| BITMAP.0[Bitmap::WRITES + index as usize / 8] >> (index % 8) & 1 == 1;
        assert!(
            written(0x79)
                && written(0x3F1)
                && written(0x2FF)
                && written(0x200)
                && written(0x23F)
                && written(0x26F)
        );
        assert!(!written(0x277) && !written(0x240) && !written(0x251) && !written(0x1FF));
        let bits: u32 = BITMAP.0.iter().map(|byte| byte.count_ones()).sum();
        assert_eq!(bits, 1 + 1 + 1 + 64 + 11);
        assert!(BITMAP.0[..2048].iter().all(|byte| *byte == 0), "no read exits");
        assert!(
            (0..0x2000)
                .filter(|index| written(*index))
                .all(|index| index == 0x79 || index == 0x3F1 || is_mtrr(index))
        );
    }
}
