//! MSR accesses of the system above that are executed for real, and values that MSRs of both vendors may
//! hold.

use mercury_abi::shared::LogKind;

use crate::cpu::Area;
use crate::exit::{Answer, Fault};
use crate::publish;
use crate::vendor::Vendor;
use crate::x86::Hardware;

/// Reads an MSR for the system above, which gets the value or the fault.
pub fn read_through<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware, index: u32) -> Answer {
    let value = hardware.read_msr(index);
    log_access(area, hardware, index, value.unwrap_or(0), false, value.is_none());
    value.map_or(Answer::Inject(Fault::GeneralProtection), Answer::Value)
}

/// Writes an MSR for the system above.
pub fn write_through(hardware: &mut impl Hardware, index: u32, value: u64) -> Answer {
    if hardware.write_msr(index, value) { Answer::Skip } else { Answer::Inject(Fault::GeneralProtection) }
}

/// Logs an access to an MSR that is executed for real.
pub fn log_access<V: Vendor>(
    area: &mut Area<V>,
    hardware: &mut impl Hardware,
    index: u32,
    value: u64,
    write: bool,
    faulted: bool,
) {
    let rip = area.cpu.interrupted.rip;
    let arguments = [u64::from(index), value, u64::from(write), u64::from(faulted), rip];
    let tsc = hardware.tsc();
    publish::log(area, LogKind::Msr, tsc, arguments);
}

/// Returns a number that is not zero if one of the eight types is illegal: 2, 3 and all above 7 (APM vol.
/// 2, 7.8.1; SDM volume 3, "Page attribute table").
#[inline]
#[must_use]
pub const fn illegal_pat(pat: u64) -> u64 {
    const EACH: u64 = 0x0101_0101_0101_0101;
    pat & (0xF8 * EACH) | pat >> 1 & !(pat >> 2) & EACH
}
