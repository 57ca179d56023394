//! Progress on the terminal for work that takes longer than two seconds.

use std::{
    io::{IsTerminal, Write},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};

/// Delay before anything is shown.
const PATIENCE: Duration = Duration::from_secs(2);

/// Runs `work`. If it takes long, shows its label on standard error, if that is a terminal.
pub fn during<T>(label: &str, work: impl FnOnce() -> T) -> T {
    if !std::io::stderr().is_terminal() {
        return work();
    }
    let (done, waiting) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || show(label, &waiting));
        let result = work();
        drop(done);
        result
    })
}

fn show(label: &str, waiting: &Receiver<()>) {
    let start = Instant::now();
    let mut shown = false;
    let mut pause = PATIENCE;
    while waiting.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        line(&format!("{label} … {} s", start.elapsed().as_secs()));
        (shown, pause) = (true, Duration::from_secs(1));
    }
    if shown {
        line("");
    }
}

/// Shows a line of progress that overwrites the last one, if standard error is a terminal.
pub fn line(text: &str) {
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        // A lost line of progress is no reason to fail.
        let _ = write!(stderr, "\r\x1b[K{text}");
        let _ = stderr.flush();
    }
}
