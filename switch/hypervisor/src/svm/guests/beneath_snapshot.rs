//! KVM and its guests beneath a snapshot or a dirty log: exits of a guest that runs on a shadow, and
//! instructions that exit only there.

use mercury_abi::shared::ExitReason;

use super::{back_from_guest, block, close, remove_shadow};
use crate::address::{GuestPhys, HostPhys};
use crate::exit::{Answer, Fault};
use crate::host::entry::Next;
use crate::snapshot::live::WritePermit;
use crate::snapshot::system_memory::{page, with_memory};
use crate::svm::shadow::{self, Fault as ShadowFault};
use crate::svm::vmcb::{TLB_FLUSH_ALL, TLB_KEEP, Vmcb, event, exit_code};
use crate::svm::{Area, Svm, exits};
use crate::vendor::Vendor;
use crate::x86::Hardware;
use crate::{exit, nested, publish};

/// Answers an exit of the system's guest that runs on a shadow. Either the shadow needed it, or KVM gets
/// it, as the world switch would have left it (APM vol. 2, 15.6).
pub fn exited(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    area.own.guest_exited = 0;
    let block = block(area);
    // SAFETY: a control block of KVM's in the window; no other code uses it before KVM goes on.
    let (code, qualification, address) =
        unsafe { ((*block).exit_code, (*block).exit_info1, (*block).exit_info2) };
    if code == exit_code::NPF {
        let write = qualification & shadow::info::WRITE != 0;
        publish::count(area, if write { ExitReason::SnapshotWrite } else { ExitReason::NestedFill });
        let bits = Svm::physical_bits(hardware);
        let fault = |area: &mut Area, _: &mut _| shadow::fault(area, address, qualification, bits);
        match with_memory(area, hardware, fault) {
            ShadowFault::Filled { wait } => {
                exit::hold_back(hardware, wait);
                return enter_again(area, qualification);
            }
            // SAFETY: as above.
            ShadowFault::Guests(qualification) => unsafe { (*block).exit_info1 = qualification },
            // As if an interrupt had come: KVM takes interrupts, and comes again. The shadow's own pages
            // may help.
            ShadowFault::Wait => {
                // SAFETY: as above.
                unsafe {
                    ((*block).exit_code, (*block).exit_info1, (*block).exit_info2) = (exit_code::INTR, 0, 0);
                }
                area.own.shadow.expire();
            }
        }
    }
    remove_shadow(area);
    area.own.entry_state_valid = 0;
    back_from_guest(area);
    Next::Run
}

/// Enters the guest again, with the event that its fault has interrupted (APM vol. 2, 15.7.2).
fn enter_again(area: &mut Area, qualification: u64) -> Next {
    // SAFETY: a control block of KVM's in the window; no other code uses it before the guest runs.
    let block = unsafe { &mut *block(area) };
    let event = block.exit_event;
    block.inject_event = if event & event::VALID != 0 { exits::event_again(event).unwrap_or(0) } else { 0 };
    // An absent entry is cached nowhere.
    let cached = qualification & shadow::info::PRESENT != 0;
    block.tlb_control = if cached { TLB_FLUSH_ALL } else { TLB_KEEP };
    block.clean = 0;
    area.own.enter_guest = 1;
    Next::Run
}

/// Emulates VMSAVE of the system above beneath a snapshot or a dirty log, so that the page is copied or
/// noted first. The world switch has saved the state (APM vol. 2, 15.5.2 and VMSAVE).
pub fn save_state(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    publish::count(area, ExitReason::Other);
    with_memory(area, hardware, |area, _| save_to_memory(area))
}

fn save_to_memory(area: &Area) -> Answer {
    let to = area.control.rax;
    if !to.is_multiple_of(4096) || !nested::is_identity::<Svm>(GuestPhys::new(to)) {
        return Answer::Inject(Fault::GeneralProtection);
    }
    match permit_write_mapped(area, to) {
        Some(WritePermit::Granted) => {}
        Some(WritePermit::Wait) => return Answer::Retry,
        _ => return Answer::Inject(Fault::GeneralProtection),
    }
    let to = page::<Vmcb>(HostPhys::new(to));
    let from = &area.control;
    // SAFETY: memory of the system's that the hypervisor's tables map while a snapshot is live; the system
    // gave it to the processor for this.
    unsafe {
        ((*to).fs, (*to).gs, (*to).tr, (*to).ldtr) = (from.fs, from.gs, from.tr, from.ldtr);
        (*to).syscall = from.syscall;
    }
    Answer::Skip
}

/// Prepares a write that passes round the tables: the snapshot keeps the page's content, or the dirty log
/// notes the page.
pub(super) fn permit_write(
    area: &mut Area,
    hardware: &mut impl Hardware,
    address: u64,
) -> Option<WritePermit> {
    with_memory(area, hardware, |area, _| permit_write_mapped(area, address))
}

/// Does the same with the system's memory mapped.
fn permit_write_mapped(area: &Area, address: u64) -> Option<WritePermit> {
    let mut guard = Svm::tables().lock()?;
    guard.as_mut().map(|nested| nested.live.permit_write(GuestPhys::new(address), area.cpu.on_snapshot))
}

/// Emulates CLGI of the system above, beneath a snapshot or a dirty log.
pub fn clear_gif(area: &mut Area) -> Answer {
    publish::count(area, ExitReason::Other);
    close(area);
    Answer::Skip
}
