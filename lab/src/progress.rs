//! The display of work that takes longer than two seconds. On a terminal the display is a spinner,
//! or a bar if the work's steps are counted. In a log it is a line when the work turns out to be
//! long, and a line at its end. Counted work has a line each half minute too.

use std::{
    io::IsTerminal,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

/// Work that is quicker than this is not shown.
const PATIENCE: Duration = Duration::from_secs(2);

/// Interval of the lines in a log for counted work.
const INTERVAL: Duration = Duration::from_secs(30);

/// Counts the steps of some work.
pub struct Count {
    /// The expected number of steps, about.
    pub expected: u64,
    /// Returns the number of steps done.
    pub done: Box<dyn FnMut() -> u64 + Send>,
}

/// Does `work`, and shows `what` if the work takes long.
pub fn step<T>(what: &str, work: impl FnOnce() -> T) -> T {
    during(what, None, work)
}

/// Does `work`, and shows `what` and the progress if the work takes long.
pub fn counted<T>(what: &str, count: Count, work: impl FnOnce() -> T) -> T {
    during(what, Some(count), work)
}

fn during<T>(what: &str, count: Option<Count>, work: impl FnOnce() -> T) -> T {
    let shown = Step::begin(what, count);
    let result = work();
    drop(shown);
    result
}

/// Work under way. Dropping this value ends the display.
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

/// Waits for the end, no longer than `patience`. Returns true if the end has come.
fn is_over(ended: &Receiver<()>, patience: Duration) -> bool {
    ended.recv_timeout(patience) != Err(RecvTimeoutError::Timeout)
}

/// Prints the progress each half minute, until the work ends.
fn say_steps(what: &str, start: Instant, count: Option<Count>, ended: &Receiver<()>) {
    let Some(mut count) = count else {
        let _ = ended.recv();
        return;
    };
    while !is_over(ended, INTERVAL) {
        eprintln!("{what}: {}", how_far((count.done)(), count.expected, start.elapsed()));
    }
}

/// Describes the progress of some work. The expected number is an estimate, which the display never
/// reaches before the end.
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
