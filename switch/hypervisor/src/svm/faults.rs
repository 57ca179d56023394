//! AMD's part of the fault points: damage to the control block. [`crate::fault`] has the others.

use mercury_abi::gate::FaultPoint;

use super::Area;
use super::vmcb::Vmcb;
use crate::fault;
use crate::x86::msr;

/// Passes the points of an exit.
pub fn in_exit(area: &mut Area) {
    if let Some(event) = fault::interrupted_event(area, area.control.rflags) {
        area.control.exit_event = event;
    }
    fault::in_exit(area);
}

/// Damages the block before an entry that follows an exit.
pub fn before_entry(area: &mut Area) {
    if fault::fires(area, FaultPoint::ExitCorruptControl) {
        area.control.asid = 0;
    }
    if fault::fires(area, FaultPoint::ExitCorruptState) {
        area.control.efer = 0;
    }
}

/// Damages the block before the first entry, so that VMRUN refuses it: each point fails one check.
pub fn before_first_entry(area: &mut Area) {
    type Damage = fn(&mut Vmcb);
    let points: [(FaultPoint, Damage); 7] = [
        (FaultPoint::RunAsidZero, |control| control.asid = 0),
        (FaultPoint::RunNoIntercept, |control| control.intercept_misc2 &= !1),
        (FaultPoint::RunCr0, |control| control.cr0 |= 1 << 32),
        (FaultPoint::RunCr4, |control| control.cr4 |= 1 << 63),
        (FaultPoint::RunEfer, |control| control.efer &= !msr::EFER_SVME),
        (FaultPoint::RunCr3, |control| control.cr3 |= 1 << 60),
        (FaultPoint::RunDr7, |control| control.dr7 |= 1 << 32),
    ];
    for (point, damage) in points {
        if fault::fires(area, point) {
            damage(&mut area.control);
        }
    }
    if fault::fires(area, FaultPoint::RunField) {
        let (offset, bits) = fault::field_and_bits(area);
        area.control.flip(offset as usize, bits);
    }
}
