//! Says what is being done when it takes longer than two seconds: a spinner on a terminal, a line
//! when it begins to be long and one when it is done elsewhere.

use std::{
    io::IsTerminal,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

/// What is quicker than this is not worth a word.
const PATIENCE: Duration = Duration::from_secs(2);

/// Does `work`, saying `what` if it takes long.
pub fn step<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let shown = Step::begin(what);
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
    fn begin(what: &str) -> Self {
        let (end, ended) = channel();
        let what = what.to_owned();
        let teller = thread::spawn(move || tell(&what, &ended));
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

fn tell(what: &str, ended: &Receiver<()>) {
    let start = Instant::now();
    if ended.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout) {
        return;
    }
    if std::io::stderr().is_terminal() {
        spin(what, start, ended);
    } else {
        eprintln!("{what} ...");
        let _ = ended.recv();
    }
    eprintln!("{what}: {:.0} s", start.elapsed().as_secs_f32());
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
