//! Intel's part of the fault points: damage to the VMCS. [`crate::fault`] has the others.

use mercury_abi::gate::FaultPoint;

use super::{Area, vmcs};
use crate::fault;
use crate::x86::{Hardware, msr::EFER_LMA};

/// Passes the points of an exit.
pub fn in_exit(area: &mut Area) {
    if let Some(event) = fault::interrupted_event(area, area.own.exit.rflags) {
        area.own.exit.event = event;
    }
    fault::in_exit(area);
}

/// Damages the VMCS before an entry that follows an exit.
pub fn before_entry(area: &mut Area, hardware: &mut impl Hardware) {
    if fault::fires(area, FaultPoint::ExitCorruptControl) {
        hardware.vmwrite(vmcs::PIN_CONTROLS, 0);
    }
    if fault::fires(area, FaultPoint::ExitCorruptState) {
        hardware.vmwrite(vmcs::GUEST_EFER, 0);
    }
}

/// Damages the VMCS before the first entry, so that the processor refuses it: each point fails one check.
pub fn before_first_entry(area: &mut Area, hardware: &mut impl Hardware) {
    type Damage = fn(u64) -> u64;
    let points: [(FaultPoint, u32, Damage); 7] = [
        (FaultPoint::RunAsidZero, vmcs::VPID, |_| 0),
        (FaultPoint::RunNoIntercept, vmcs::PIN_CONTROLS, |_| 0),
        (FaultPoint::RunCr0, vmcs::GUEST_CR0, |cr0| cr0 | 1 << 32),
        (FaultPoint::RunCr4, vmcs::GUEST_CR4, |cr4| cr4 | 1 << 63),
        (FaultPoint::RunEfer, vmcs::GUEST_EFER, |efer| efer & !EFER_LMA),
        (FaultPoint::RunCr3, vmcs::GUEST_CR3, |cr3| cr3 | 1 << 60),
        (FaultPoint::RunDr7, vmcs::GUEST_DR7, |dr7| dr7 | 1 << 32),
    ];
    for (point, field, damage) in points {
        if fault::fires(area, point) {
            let value = hardware.vmread(field);
            hardware.vmwrite(field, damage(value));
        }
    }
    if fault::fires(area, FaultPoint::RunField) {
        let (field, bits) = fault::field_and_bits(area);
        let value = hardware.vmread(field);
        hardware.vmwrite(field, value ^ bits);
    }
}
