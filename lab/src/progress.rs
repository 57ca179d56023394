//! Says what is being done when it takes longer than two seconds: a spinner on a terminal, or a bar where the work's steps are
//! counted; elsewhere a line when it begins to be long, one each half minute where steps are counted, and one when it is done.

use std::{
    io::IsTerminal,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

/// What is quicker than this is not worth a word.
const PATIENCE: Duration = Duration::from_secs(2);

/// A line is said so often where there is no terminal and steps are counted.
const INTERVAL: Duration = Duration::from_secs(30);

/// Counts the steps of some work.
pub struct Count {
    /// How many there are, about.
    pub expected: u64,
    /// Returns how many are done.
    pub done: Box<dyn FnMut() -> u64 + Send>,
}

/// Does `work`, saying `what` if it takes long.
pub fn step<T>(what: &str, work: impl FnOnce() -> T) -> T {
    during(what, None, work)
}

/// Does `work`, saying `what` and how far it has come if it takes long.
pub fn counted<T>(what: &str, count: Count, work: impl FnOnce() -> T) -> T {
    during(what, Some(count), work)
}

fn during<T>(what: &str, count: Option<Count>, work: impl FnOnce() -> T) -> T {
    let shown = Step::begin(what, count);
    let result = work();
    drop(shown);
    result
}

/// Something under way; it is over when this is dropped.
struct Step {
    end: Option<Sender<()>>,
    teller: Option<JoinHandle<()>>,
}

impl Step {
    fn begin(what: &str, count: Option<Count>) -> Self {
        let (end, ended) = channel();
        let what = what.to_owned();
        let teller = thread::spawn(move || tell(&what, count, &ended));
        Self { end: Some(end), teller: Some(teller) }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(teller) = self.teller.take() {
            let _ = teller.join();
        }
    }
}

fn tell(what: &str, count: Option<Count>, ended: &Receiver<()>) {
    let start = Instant::now();
    if is_over(ended, PATIENCE) {
        return;
    }
    match (std::io::stderr().is_terminal(), count) {
        (true, None) => spin(what, start, ended),
        (true, Some(count)) => show_bar(what, start, count, ended),
        (false, count) => {
            eprintln!("{what} ...");
            say_steps(what, start, count, ended);
        }
    }
    eprintln!("{what}: {:.0} s", start.elapsed().as_secs_f32());
}

/// Waits for the end, no longer than a time. Returns true if it has come.
fn is_over(ended: &Receiver<()>, patience: Duration) -> bool {
    ended.recv_timeout(patience) != Err(RecvTimeoutError::Timeout)
}

/// Says each half minute how far the work has come, until it ends.
fn say_steps(what: &str, start: Instant, count: Option<Count>, ended: &Receiver<()>) {
    let Some(mut count) = count else {
        let _ = ended.recv();
        return;
    };
    while !is_over(ended, INTERVAL) {
        eprintln!("{what}: {}", how_far((count.done)(), count.expected, start.elapsed()));
    }
}

/// Describes how far some work has come. What is expected is an estimate: it is never reached before the end.
fn how_far(done: u64, expected: u64, elapsed: Duration) -> String {
    let percent = (done * 100 / expected.max(1)).min(99);
    format!("{percent} % after {} min {:02} s", elapsed.as_secs() / 60, elapsed.as_secs() % 60)
}

fn show_bar(what: &str, start: Instant, mut count: Count, ended: &Receiver<()>) {
    let bar = ProgressBar::new(count.expected).with_elapsed(start.elapsed());
    if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:30}] {percent} % {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    while !is_over(ended, Duration::from_millis(500)) {
        bar.set_position((count.done)().min(count.expected * 99 / 100));
    }
    bar.finish_and_clear();
}

fn spin(what: &str, start: Instant, ended: &Receiver<()>) {
    let bar = ProgressBar::new_spinner().with_elapsed(start.elapsed());
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ... {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar.enable_steady_tick(Duration::from_millis(120));
    let _ = ended.recv();
    bar.finish_and_clear();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_is_not_reached_before_the_end() {
        let minute = Duration::from_secs(61);
        assert_eq!(how_far(0, 200, minute), "0 % after 1 min 01 s");
        assert_eq!(how_far(50, 200, minute), "25 % after 1 min 01 s");
        assert_eq!(how_far(500, 200, minute), "99 % after 1 min 01 s");
        assert_eq!(how_far(0, 0, minute), "0 % after 1 min 01 s");
    }
}
