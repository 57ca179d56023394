//! Where a test wants an end of a move to hold still for a while, so that whatever is to fail there fails exactly there:
//! `--pause-at STEP` at the source, which what has arrived remembers, and [`WORD`] on the command line of the spare's small
//! system. There it may have to eat at a step, too ([`EAT_WORD`]): all memory, as something that runs away does. Steps are the states of [`mercury_migration::protocol`]; an end holds still when it has entered one, and has
//! done nothing of what is to be done there.

use std::{
    fmt::Debug,
    thread,
    time::{Duration, Instant},
};

/// On the small system's command line.
pub const WORD: &str = "mercury.pause-at";
/// On the small system's command line: where it runs out of memory.
pub const EAT_WORD: &str = "mercury.eat-at";
/// For how long.
const HOLD: Duration = Duration::from_secs(5);
/// Whoever watches is asked so often.
const PIECE: Duration = Duration::from_millis(100);

/// The step at which to hold still, once.
#[derive(Clone, Debug, Default)]
pub struct Pause(Option<String>);

impl Pause {
    /// At this one, if any is named.
    #[must_use]
    pub fn at(step: Option<&str>) -> Self {
        Self(step.map(str::to_owned))
    }

    /// At the one that a command line names.
    #[must_use]
    pub fn of_command_line(line: &str, named_by: &str) -> Self {
        Self::at(line.split_whitespace().find_map(|word| word.strip_prefix(named_by)?.strip_prefix('=')))
    }

    /// What is to be said, if this is the step, before [`hold`]. Of a state with something in it the name counts.
    pub fn reached(&mut self, step: impl Debug) -> Option<String> {
        let said = format!("{step:?}");
        let name = said.split(|letter: char| !letter.is_alphanumeric()).find(|name| !name.is_empty())?;
        self.0.take_if(|wanted| wanted == name).map(|name| format!("paused at {name}"))
    }
}

/// Holds still.
pub fn hold(mut watch: impl FnMut()) {
    let end = Instant::now() + HOLD;
    while Instant::now() < end {
        watch();
        thread::sleep(PIECE);
    }
}

/// Takes memory until there is none left, and this process is killed for it.
pub fn eat() -> ! {
    const BITE: usize = 1 << 20;
    loop {
        // What was never written to would not be there.
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
