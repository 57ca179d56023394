//! Pauses for tests, so that a failure hits an exact step. `--pause-at STEP` pauses the source, and
//! the machine remembers the step after its arrival. [`WORD`] on the command line of the
//! destination's restore environment pauses the destination. [`EAT_WORD`] makes that environment
//! use up all memory at a step, as a runaway program does. Steps are the states of
//! [`mercury_migration::protocol`]. An end pauses when it has entered the state, before it acts.

use std::{
    fmt::Debug,
    thread,
    time::{Duration, Instant},
};

/// Word on the restore environment's command line: the step at which to pause.
pub const WORD: &str = "mercury.pause-at";
/// Word on the restore environment's command line: the step at which to run out of memory.
pub const EAT_WORD: &str = "mercury.eat-at";
/// Length of the pause.
const HOLD: Duration = Duration::from_secs(5);
/// Interval at which `watch` is called.
const PIECE: Duration = Duration::from_millis(100);

/// The step at which to pause, once.
#[derive(Clone, Debug, Default)]
pub struct Pause(Option<String>);

impl Pause {
    /// Makes a pause at this step, if one is named.
    #[must_use]
    pub fn at(step: Option<&str>) -> Self {
        Self(step.map(str::to_owned))
    }

    /// Makes a pause at the step that a command line names.
    #[must_use]
    pub fn of_command_line(line: &str, named_by: &str) -> Self {
        Self::at(line.split_whitespace().find_map(|word| word.strip_prefix(named_by)?.strip_prefix('=')))
    }

    /// Returns the message to print if this is the step, before [`hold`]. For a state with fields
    /// only the name counts.
    pub fn reached(&mut self, step: impl Debug) -> Option<String> {
        let said = format!("{step:?}");
        let name = said.split(|letter: char| !letter.is_alphanumeric()).find(|name| !name.is_empty())?;
        self.0.take_if(|wanted| wanted == name).map(|name| format!("paused at {name}"))
    }
}

pub fn hold(mut watch: impl FnMut()) {
    let end = Instant::now() + HOLD;
    while Instant::now() < end {
        watch();
        thread::sleep(PIECE);
    }
}

/// Allocates memory until there is none left, and the kernel kills this process.
pub fn eat() -> ! {
    const BITE: usize = 1 << 20;
    loop {
        // Memory that is never written to would not be allocated.
        std::mem::forget(std::hint::black_box(vec![1_u8; BITE]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_migration::protocol::{Digest, source::State};

    #[test]
    fn a_step_is_met_once() {
        let mut pause = Pause::of_command_line("quiet mercury.pause-at=Asking mercury.receive", WORD);
        assert_eq!(pause.reached(State::Recording), None);
        let asking = State::Asking(Digest([0; 32]));
        assert_eq!(pause.reached(asking), Some("paused at Asking".into()));
        assert_eq!(pause.reached(asking), None);
        assert_eq!(Pause::at(Some("Arrived")).reached("Arrived"), Some("paused at Arrived".into()));
        assert_eq!(
            Pause::of_command_line("mercury.receive mercury.pause-at=Arrived", EAT_WORD).reached("Arrived"),
            None
        );
    }
}
