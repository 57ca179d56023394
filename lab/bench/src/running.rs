//! A hosted machine that runs, and its console.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use mercury_lab::error::{Context, Error, Result};

const LIMIT: Duration = Duration::from_secs(240);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A machine, which is killed when this is dropped.
pub(crate) struct Running {
    child: Child,
    log: PathBuf,
}

impl Running {
    /// Starts a machine, whose console goes to a file.
    pub(crate) fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let file = File::create(log).context(|| format!("write {}", log.display()))?;
        let errors = file.try_clone().context(|| "keep the log open".into())?;
        let child = command.stdin(Stdio::piped()).stdout(file).stderr(errors).spawn();
        Ok(Self { child: child.context(|| "start a hosted machine".into())?, log: log.to_owned() })
    }

    /// Returns the number of its first process.
    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn type_line(&mut self, line: &str) -> Result<()> {
        let input =
            self.child.stdin.as_mut().ok_or_else(|| Error::Host("a machine has no console".into()))?;
        writeln!(input, "{line}").context(|| "type a line".into())
    }

    /// Waits until the machine has said some text. Returns the line after it, as far as it is there. A text
    /// that ends with a blank is waited for until its line is complete.
    pub(crate) fn wait_for(&mut self, text: &str) -> Result<String> {
        let start = Instant::now();
        loop {
            let said = fs::read_to_string(&self.log).unwrap_or_default().replace('\r', "");
            if let Some((_, rest)) = said.split_once(text)
                && (!text.ends_with(' ') || rest.contains('\n'))
            {
                return Ok(rest.lines().next().unwrap_or_default().to_owned());
            }
            let is_ended = self.child.try_wait().is_ok_and(|status| status.is_some());
            if is_ended || start.elapsed() > LIMIT {
                return Err(Error::Host(format!("a machine does not say {text:?}: {said}")));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
