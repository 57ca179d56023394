//! MSRs of the guest: which writes exit, and what they mean.
//!
//! EFER, PAT, DEBUGCTL and SYSENTER need no interception: entries and exits load and save them. Intercepted
//! are writes of the MTRRs, whose types the nested tables repeat (HARDWARE I-17), of the microcode trigger
//! (L-11), and of IA32_PEBS_ENABLE: its records would go through the hypervisor's page tables. Beyond those the processor exits by itself for all MSRs outside of the bitmap's two ranges
//! (SDM volume 3, "MSR-bitmap address"): they are executed for real (I-30).

use mercury_abi::code::Code;
use mercury_abi::shared::ExitReason;

use super::Area;
use crate::exit::{Answer, Fault};
use crate::msr::{log_access, read_through, write_through};
use crate::publish;
use crate::x86::{Hardware, msr};

/// The MSR bitmap (SDM volume 3, "MSR-bitmap address"): reads of the low and the high range, then writes.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Bitmap([u8; 4096]);

/// The bitmap of all CPUs.
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

/// The guest reads an MSR that exits.
pub fn read(area: &mut Area, hardware: &mut impl Hardware, index: u32) -> Answer {
    publish::count(area, ExitReason::MsrPassThrough);
    read_through(area, hardware, index)
}

/// The guest writes an MSR that exits.
pub fn write(area: &mut Area, hardware: &mut impl Hardware, index: u32, value: u64) -> Answer {
    let (reason, answer) = match index {
        _ if area.own.foreign != 0 => (ExitReason::MsrPassThrough, write_foreign(hardware, index, value)),
        msr::MICROCODE_TRIGGER => (ExitReason::MsrMicrocode, Answer::Depart(Code::MicrocodeUpdate)),
        msr::PEBS_ENABLE if value != 0 => (ExitReason::MsrPassThrough, Answer::Depart(Code::DebugStore)),
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

/// A value that is there already changes nothing: Linux writes the same ones on each CPU that comes online.
/// Any other makes the tables wrong: the CPU leaves and writes it natively, and is not attached again until
/// the tables have been built afresh.
fn write_mtrr(hardware: &mut impl Hardware, index: u32, value: u64) -> Answer {
    match hardware.read_msr(index) {
        Some(current) if current == value => Answer::Skip,
        Some(_) => Answer::Depart(Code::MtrrChanged),
        None => Answer::Inject(Fault::GeneralProtection),
    }
}

/// Another kernel's writes, beneath which the hypervisor has to stay. Its MTRRs are those that it found, but for
/// the while in which it writes them; the nested tables keep their types. Microcode and records of samples it
/// does not get.
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
