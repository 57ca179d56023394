//! The part of the controller that one thread owns: its queues, and what is done for them.

use super::{
    admin::{Answer, KEPT},
    command::{Command, Status},
    identify::{Identity, Namespace},
    io::Storage,
    queue::{Completions, End, Missing, Submissions},
    registers::{Registers, Values, configuration, status},
};
use crate::{Interrupts, Memory, gate::Gated};
use std::sync::Arc;

/// Commands of one queue that are executed before the next queue has its turn.
const BURST: usize = 16;
/// The queues of administration raise the first vector.
const ADMIN_VECTOR: u16 = 0;

/// A controller.
#[derive(Debug)]
pub struct Controller<M, I> {
    pub(super) registers: Arc<Registers>,
    pub(super) memory: Gated<M>,
    interrupts: I,
    pub(super) identity: Identity,
    pub(super) storage: Storage,
    /// Pairs of queues besides the administrator's.
    pub(super) pairs: u16,
    /// Largest number of entries of a queue.
    pub(super) entries: u16,
    pub(super) vectors: u32,
    pub(super) submissions: Vec<Submissions>,
    pub(super) completions: Vec<Completions>,
    /// Number of resets before the controller was switched on.
    resets: u64,
    /// Number of commands that wait for an event.
    pub(super) events: u8,
    pub(super) features: [u32; KEPT.len()],
}

/// Limits of a controller.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Pairs of queues besides the administrator's.
    pub pairs: u16,
    /// Largest number of entries of a queue.
    pub entries: u16,
    /// Number of vectors.
    pub vectors: u32,
}

impl<M: Memory, I: Interrupts> Controller<M, I> {
    /// Makes a controller that is off.
    pub fn new(
        identity: Identity,
        namespaces: Vec<Namespace>,
        limits: Limits,
        memory: M,
        interrupts: I,
    ) -> Self {
        let Limits { pairs, entries, vectors } = limits;
        let (pairs, entries) = (pairs.max(1), entries.max(2));
        let registers = Arc::new(Registers::new(pairs, entries, identity.version()));
        let memory = Gated::new(memory, registers.gate().pass());
        let storage = Storage { namespaces, transfer_max: identity.transfer_max(), caches: true };
        Self {
            registers,
            memory,
            interrupts,
            identity,
            storage,
            pairs,
            entries,
            vectors,
            submissions: Vec::new(),
            completions: Vec::new(),
            resets: 0,
            events: 0,
            features: [0; KEPT.len()],
        }
    }

    /// Returns the registers.
    #[must_use]
    pub fn registers(&self) -> Arc<Registers> {
        Arc::clone(&self.registers)
    }

    /// Does what was asked for until nothing is left. It is called after a write of a register that
    /// [`Registers::write`] returns true for.
    pub fn work(&mut self) {
        loop {
            self.follow();
            if self.submissions.is_empty() {
                return;
            }
            let mut did = false;
            // Commands of administration make and delete queues.
            let numbers: Vec<u16> = self.submissions.iter().map(|one| one.number).collect();
            for number in numbers {
                match self.serve(number) {
                    Ok(some) => did |= some,
                    // A reset has shut the gate to the memory.
                    Err(Missing) if !self.is_current() => break,
                    Err(Missing) => return self.fail(),
                }
            }
            if !did && self.is_current() {
                return;
            }
        }
    }

    /// Ends the work in order: writes last.
    ///
    /// # Errors
    /// A disk did not take them.
    pub fn finish(&mut self) -> Result<(), String> {
        let mut failed = Vec::new();
        for namespace in &mut self.storage.namespaces {
            if let Err(error) = namespace.disk.flush() {
                failed.push(format!("namespace {}: {error}", namespace.number));
            }
        }
        if failed.is_empty() { Ok(()) } else { Err(failed.join(", ")) }
    }

    /// Follows the configuration: on, off, and to a shutdown.
    fn follow(&mut self) {
        let values = self.registers.values().clone();
        let is_on = values.configuration & configuration::ENABLE != 0;
        let was_on = values.status & (status::READY | status::FATAL) != 0;
        match (is_on, was_on) {
            (true, false) => self.switch_on(&values),
            (false, true) => self.switch_off(),
            // The driver has not waited for the controller to be off.
            (true, true) if values.resets != self.resets => {
                self.switch_off();
                self.switch_on(&values);
            }
            _ => {}
        }
        let wants_shutdown = values.configuration & configuration::SHUTDOWN != 0;
        if wants_shutdown && values.status & status::SHUTDOWN != status::SHUT_DOWN {
            // The driver waits for this before it cuts the power. The disk remembers an error.
            let _ = self.storage.flush();
            let mut values = self.registers.values();
            values.status = values.status & !status::SHUTDOWN | status::SHUT_DOWN;
        }
    }

    fn switch_on(&mut self, values: &Values) {
        self.clear();
        self.resets = values.resets;
        let (submissions, completions) =
            (values.admin_sizes as u16 & 0xFFF, (values.admin_sizes >> 16) as u16);
        let is_possible =
            values.configuration & configuration::SETS_AND_PAGES == 0 && submissions > 0 && completions > 0;
        if !is_possible {
            return self.fail();
        }
        self.submissions.push(Submissions::new(0, 0, values.admin_submission, submissions + 1));
        let queue = Completions::new(0, values.admin_completion, completions + 1, Some(ADMIN_VECTOR));
        self.completions.push(queue);
        let mut values = self.registers.values();
        values.doorbells.fill(0);
        values.status = status::READY;
    }

    fn switch_off(&mut self) {
        self.clear();
        // A driver that switches on again may read what was written before. The disk remembers an error.
        let _ = self.storage.flush();
        let mut values = self.registers.values();
        values.doorbells.fill(0);
        values.status &= status::SHUTDOWN;
        if values.configuration & configuration::SHUTDOWN == 0 {
            values.status = 0;
        }
    }

    fn clear(&mut self) {
        self.submissions.clear();
        self.completions.clear();
        self.events = 0;
        self.features = [0; KEPT.len()];
        self.storage.caches = true;
    }

    /// Stops until the driver switches the controller off.
    fn fail(&mut self) {
        self.clear();
        let mut values = self.registers.values();
        values.status = values.status & !status::READY | status::FATAL;
    }

    /// Executes commands of a queue. Returns true if there was one.
    fn serve(&mut self, number: u16) -> Result<bool, Missing> {
        for done in 0..BURST {
            let Some((at, to)) = self.ready(number) else { return Ok(done > 0) };
            let command = self.submissions[at].take(&self.memory)?;
            let Some((status, value)) = self.execute(number, &command) else { continue };
            let end = End { identifier: command.identifier(), status, value };
            // Queues may have moved in their lists, or be gone with the command.
            let Some(from) = self.submissions.iter().find(|one| one.number == number) else { continue };
            let Some(queue) = self.completions.iter_mut().find(|one| one.number == to) else { continue };
            queue.put(end, from, &self.memory)?;
            self.storage.answer();
            if let Some(vector) = queue.vector {
                self.interrupts.raise(vector);
            }
        }
        Ok(true)
    }

    /// Returns the place of a queue that has a command and room for its end, and the number of the queue for
    /// the end.
    fn ready(&mut self, number: u16) -> Option<(usize, u16)> {
        let at = self.submissions.iter().position(|one| one.number == number)?;
        let queue = &self.submissions[at];
        let completions = self.completions.iter().find(|one| one.number == queue.completions)?;
        let to = completions.number;
        if !queue.has_command(&self.registers) || completions.is_full(&self.registers) {
            return None;
        }
        // A reset after this shuts the gate for the command.
        let values = self.registers.values();
        let is_on = values.configuration & configuration::ENABLE != 0 && values.resets == self.resets;
        if is_on {
            self.memory.renew();
        }
        is_on.then_some((at, to))
    }

    /// Returns true if no reset has come since the controller was switched on.
    fn is_current(&self) -> bool {
        self.registers.values().resets == self.resets
    }

    fn execute(&mut self, queue: u16, command: &Command) -> Option<(Status, u32)> {
        self.storage.begin();
        let outcome = if queue == 0 {
            match self.administrate(command) {
                Answer::Now(outcome) => outcome,
                Answer::Later => return None,
            }
        } else {
            self.storage.execute(command, &self.memory)
        };
        Some(match outcome {
            Ok(value) => (Status::DONE, value),
            Err(status) => (status, 0),
        })
    }
}
