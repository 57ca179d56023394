//! The output of a long job while it runs: headings, and one line, marked "live", that is rewritten
//! on a terminal. In a log the line is printed twice a minute, so that a reader sees progress.

use std::{
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};

const IN_A_LOG: Duration = Duration::from_secs(30);

/// Begins a part of the job.
pub fn say(what: &str) {
    println!("\n==> {what}");
}

/// The line that is rewritten.
#[derive(Debug)]
pub struct Line {
    start: Instant,
    printed: Instant,
}

impl Line {
    /// Begins the line, and counts the seconds from now on.
    #[must_use]
    pub fn begin() -> Self {
        Self { start: Instant::now(), printed: Instant::now() }
    }

    /// Returns the time since the line began.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Shows another text in the line.
    pub fn show(&mut self, text: &str) {
        let text = format!("  live {:4.0} s  {text}", self.elapsed().as_secs_f32());
        if std::io::stdout().is_terminal() {
            print!("\r\x1b[2K{text}");
            let _ = std::io::stdout().flush();
        } else if self.printed.elapsed() >= IN_A_LOG {
            self.printed = Instant::now();
            println!("{text}");
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if std::io::stdout().is_terminal() {
            print!("\r\x1b[2K");
            let _ = std::io::stdout().flush();
        }
    }
}
