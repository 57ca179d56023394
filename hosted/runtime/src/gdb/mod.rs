//! A debugger at the machine: gdb's remote protocol (the crate `gdbstub`) over a socket.
//!
//! The machine stops for gdb between two of the guest's instructions. The processor's thread does
//! what gdb asks until gdb lets it go on. [`connection`] has the socket and the thread that listens
//! to it, [`target`] gdb's view of the machine, [`registers`] its processor, and [`step`] the
//! successors of an instruction. Steps are breakpoints there.

mod connection;
pub(crate) mod fuzz;
mod registers;
mod step;
mod target;

use std::{collections::BTreeMap, fmt, ops::Range, os::fd::RawFd};

pub(crate) use connection::listen_at;
use connection::{Connection, Listener};
pub use connection::{Opened, open};
use gdbstub::{
    common::Signal,
    stub::{DisconnectReason, GdbStub, SingleThreadStopReason, state_machine::GdbStubStateMachine},
};
use target::{Action, Target};

use crate::{
    error::Result,
    load::Filled,
    machine::{End, Machine},
};

type Session = GdbStubStateMachine<'static, Target, Connection>;
type Reason = SingleThreadStopReason<u64>;

/// The debugger's end in the machine.
pub struct Debugger {
    listener: Listener,
    target: Target,
    session: Option<Session>,
    waits: bool,
}

impl fmt::Debug for Debugger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Debugger").field("target", &self.target).finish_non_exhaustive()
    }
}

/// The kernel's code as a debugger has to know it.
#[derive(Debug, Default)]
pub struct KernelCode {
    /// Its addresses.
    pub ranges: Vec<Range<u64>>,
    /// Filled slots, by their addresses.
    pub slots: BTreeMap<u64, Filled>,
    /// The size of the code for slots, in bytes.
    pub slot_code: u64,
}

impl Debugger {
    /// Begins to listen. The calling thread gets SIGUSR1 when gdb connects or sends something.
    ///
    /// # Errors
    /// If there can be no thread.
    pub fn new(opened: Opened, code: KernelCode) -> Result<Self> {
        let target = Target::new(code);
        let waits = opened.waits;
        Ok(Self { listener: Listener::new(opened)?, target, session: None, waits })
    }

    /// Returns the descriptor of the listening socket.
    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.listener.descriptor()
    }

    /// Returns true if gdb wants the machine to stop.
    pub(crate) fn is_wanted(&self) -> bool {
        self.waits || self.listener.is_wanted()
    }

    /// Returns true if interrupts have to wait until a step is over.
    pub(crate) fn holds_interrupts(&self) -> bool {
        self.target.holds_interrupts
    }

    /// Delivers interrupts again: a step has led somewhere else.
    pub(crate) fn release_interrupts(&mut self) {
        self.target.holds_interrupts = false;
    }

    /// Returns true if gdb has a breakpoint at an address.
    pub(crate) fn has_breakpoint(&self, at: u64) -> bool {
        self.target.has_breakpoint(at)
    }

    /// Does what gdb wants, if it wants something.
    pub(crate) fn attend(&mut self, machine: &mut Machine) {
        while std::mem::take(&mut self.waits) || self.listener.is_wanted() {
            if let Some(connection) = self.listener.accept() {
                let begun = GdbStub::new(connection).run_state_machine(&mut self.target);
                self.session = begun.ok();
            }
            self.converse(machine, None);
        }
    }

    /// Stops at a breakpoint, to which the guest has come.
    pub(crate) fn stopped(&mut self, machine: &mut Machine) {
        let at = machine.block().registers.rip.get();
        let reason = if self.target.has_step_to(at) { Reason::DoneStep } else { Reason::SwBreak(()) };
        self.listener.stop();
        self.converse(machine, Some(reason));
    }

    /// Listens to gdb until it lets the guest go on.
    fn converse(&mut self, machine: &mut Machine, mut reason: Option<Reason>) {
        self.target.end_step(machine);
        self.target.enter(machine);
        let mut session = self.session.take();
        while let Some(now) = session.take() {
            session = match now {
                GdbStubStateMachine::Idle(mut idle) => match idle.borrow_conn().read() {
                    Some(byte) => idle.incoming_data(&mut self.target, byte).ok(),
                    None => None,
                },
                GdbStubStateMachine::Running(running) if reason.is_some() => {
                    running.report_stop(&mut self.target, reason.take().unwrap_or(Reason::DoneStep)).ok()
                }
                GdbStubStateMachine::Running(mut running) => match running.borrow_conn().read_now() {
                    Ok(Some(byte)) => running.incoming_data(&mut self.target, byte).ok(),
                    Ok(None) => {
                        session = Some(running.into());
                        break;
                    }
                    Err(_) => None,
                },
                GdbStubStateMachine::CtrlCInterrupt(interrupt) => {
                    let signal = Reason::Signal(Signal::SIGINT);
                    interrupt.interrupt_handled(&mut self.target, Some(signal)).ok()
                }
                GdbStubStateMachine::Disconnected(end) => {
                    if end.get_reason() == DisconnectReason::Kill {
                        self.target.leave();
                        machine.end(End::Ended, "ended by gdb");
                    }
                    None
                }
            };
        }
        self.target.leave();
        self.session = session;
        if self.session.is_none() {
            self.target.remove_all(machine);
        } else if self.target.action == Action::Step {
            self.target.begin_step(machine);
        }
        self.listener.go_on(self.session.is_some());
    }
}
