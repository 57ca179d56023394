//! The gate between a controller and the guest's memory.
//!
//! A driver that resets its controller frees the memory of its commands. A command whose disk hangs on the
//! host outlives the reset, and must not reach that memory any more. The processor that resets shuts the
//! gate before its write has an effect: it waits for one copy at most, and never for a disk.

use crate::Memory;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A gate.
#[derive(Debug, Default)]
pub struct Gate(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Number of times that the gate was shut.
    age: u64,
    /// True while the function may not reach memory at all.
    is_cut: bool,
}

/// Leave to reach the memory until the gate is shut.
#[derive(Clone, Debug)]
pub struct Pass {
    gate: Arc<Gate>,
    age: u64,
}

/// The guest's memory for the holder of a pass. Without a valid pass there is no memory.
#[derive(Debug)]
pub struct Gated<M> {
    memory: M,
    pass: Pass,
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends every pass. Waits for the copy that is being made.
    pub fn shut(&self) {
        self.state().age += 1;
    }

    /// Follows Bus Master Enable of the function.
    pub fn set_master(&self, is_master: bool) {
        let mut state = self.state();
        if !is_master && !state.is_cut {
            state.age += 1;
        }
        state.is_cut = !is_master;
    }

    /// Returns a pass for a command that begins.
    pub fn pass(self: &Arc<Self>) -> Pass {
        Pass { gate: Arc::clone(self), age: self.state().age }
    }
}

impl Pass {
    /// Returns true if the gate was not shut since.
    pub fn is_valid(&self) -> bool {
        self.enter().is_some()
    }

    /// Keeps the gate open until the guard is dropped.
    fn enter(&self) -> Option<MutexGuard<'_, State>> {
        Some(self.gate.state()).filter(|state| state.age == self.age && !state.is_cut)
    }
}

impl<M> Gated<M> {
    pub fn new(memory: M, pass: Pass) -> Self {
        Self { memory, pass }
    }

    /// Takes a pass for the next command.
    pub fn renew(&mut self) {
        self.pass = self.pass.gate.pass();
    }
}

impl<M: Memory> Memory for Gated<M> {
    fn read(&self, at: u64, into: &mut [u8]) -> Option<()> {
        let _open = self.pass.enter()?;
        self.memory.read(at, into)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Option<()> {
        let _open = self.pass.enter()?;
        self.memory.write(at, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Ram;

    #[test]
    fn a_pass_ends_when_the_gate_is_shut_or_the_function_is_no_master() {
        let gate = Arc::new(Gate::default());
        let mut memory = Gated::new(Ram::new(16), gate.pass());
        assert_eq!(memory.write(0, &[1]), Some(()));
        gate.shut();
        assert_eq!((memory.write(0, &[2]), memory.read(0, &mut [0])), (None, None));
        memory.renew();
        let mut byte = [0];
        assert_eq!((memory.read(0, &mut byte), byte), (Some(()), [1]));
        gate.set_master(true);
        assert!(gate.pass().is_valid() && memory.pass.is_valid());
        gate.set_master(false);
        assert!(!gate.pass().is_valid() && !memory.pass.is_valid());
        gate.set_master(true);
        assert!(!memory.pass.is_valid(), "a command that began before does not go on");
        assert!(gate.pass().is_valid());
    }
}
