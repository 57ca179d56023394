//! The machine in several processes, of which one at a time has the turn ([`crate::process::per_space`]).

use std::sync::atomic::Ordering;

use super::{End, Machine, Writer, pending};
use crate::{
    fork::Work,
    layout::PAGE,
    process::per_space::{Event, Request, SpaceProcess},
    selectors, signal,
};

impl Machine {
    /// Asks the first process if this is another address-space process. Returns true if it has
    /// asked. Otherwise the caller does the work itself.
    pub(crate) fn ask_first_process(&self, request: Request) -> bool {
        let space = self.placement.per_space().filter(|space| !space.is_first());
        space.inspect(|space| space.ask(request)).is_some()
    }

    /// Goes on with the guest, here or in another address-space process. In the latter case the
    /// function returns when the guest has come back, with other registers.
    pub(crate) fn resume_or_hand_over(&mut self) {
        let Some(space) = self.placement.per_space() else {
            return self.catch_up_with_layers(Writer::This);
        };
        while space.is_elsewhere() {
            let rip = self.block().registers.rip.get();
            space.show(rip, self.visible(rip));
            self.block().data.set(selectors::read());
            // The first process watches for processes that have ended.
            let _ = space.hand_over(|| self.follow());
            selectors::load(self.block().data.get());
            self.catch_up(space);
        }
        if space.take_stale() {
            self.compare_with_tables();
        }
        self.catch_up_with_layers(Writer::This);
    }

    /// Receives the guest in an address-space process that has its first turn.
    pub(crate) fn receive_guest(&mut self) {
        let Some(space) = self.placement.per_space() else { return };
        selectors::load(self.block().data.get());
        self.catch_up(space);
        self.resume_or_hand_over();
    }

    /// Repeats the events of other processes that concern this one.
    fn catch_up(&mut self, space: SpaceProcess) {
        self.catch_up_with_layers(Writer::Any);
        let Some(events) = space.take_events() else {
            self.drop_kernel();
            if let Some(copies) = &mut self.resident.copies {
                copies.begin_anew(&self.memory);
            }
            return;
        };
        for event in events {
            match (event, &mut self.resident.copies) {
                (Event::KernelPageDropped(page), _) => self.memory.unmap(page, PAGE),
                (Event::KernelDropped, _) => self.drop_kernel(),
                (Event::Copied(page), Some(copies)) => copies.copied_elsewhere(page),
                (Event::Written(page), Some(copies)) => copies.written_elsewhere(&self.memory, page),
                _ => {}
            }
        }
    }

    /// Does in the first process what the others ask for, and lets the guest go on in the process
    /// of its address space.
    pub(crate) fn serve_space_processes(&mut self, space: SpaceProcess) -> ! {
        space.load(self.vcpu.cr3, true);
        loop {
            self.catch_up_with_layers(Writer::Any);
            match space.take_request() {
                None => {}
                Some(Request::Service) => self.deliver_pending(),
                Some(Request::Emulate(instruction)) => {
                    if let Err(exception) = self.emulate(&instruction) {
                        self.block().registers.rip.set(instruction.ip());
                        self.inject(exception);
                    }
                }
                Some(Request::Access(physical)) => {
                    if let Err(exception) = self.touch_device(physical) {
                        self.inject(exception);
                    }
                }
                Some(Request::End(how)) => self.end(how, &space.reason()),
            }
            if self.interruptible() && pending().load(Ordering::Acquire) != 0 {
                self.service();
            }
            self.save_if_wanted();
            self.obey_template(Work::Any);
            if space.hand_over(|| ()).is_none() {
                self.end(End::Broken, &signal::how_child_has_ended());
            }
        }
    }
}
