//! `lab times`: the time that the targets of the README take on this host, and the space that they take on
//! its disk.

use std::{
    io::Read,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use mercury_lab::{
    error::{Context, Error, Result},
    paths,
};

/// The end of the prompt of a machine's shell.
const PROMPT: &str = "~# ";
/// The longest time of `make demo-checkpoint` on a quiet host on which all is built.
pub const DEMO_CHECKPOINT_WITHIN: Duration = Duration::from_secs(180);

/// The end of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    /// The command has ended.
    End,
    /// A prompt has come.
    Prompt,
}

/// Targets of `make` with the arguments of `lab` for each.
const TARGETS: [(&str, &[&str], Until); 8] = [
    ("demo", &["demo"], Until::End),
    ("demo-checkpoint", &["demo", "checkpoint"], Until::End),
    ("demo-disco", &["demo", "disco"], Until::End),
    ("demo-guard", &["demo", "guard"], Until::End),
    ("demo-guest", &["demo", "guest"], Until::End),
    ("demo-move", &["demo", "move"], Until::End),
    ("shell", &["shell"], Until::Prompt),
    ("pair", &["pair"], Until::Prompt),
];

/// Names of all targets.
#[must_use]
pub fn names() -> Vec<&'static str> {
    TARGETS.iter().map(|(name, ..)| *name).collect()
}

/// Runs targets one after another, all if none is given, and prints a line of a table for each.
///
/// # Errors
/// If a target fails.
pub fn run(wanted: &[String]) -> Result<()> {
    println!("| | time | load of the host before |\n|---|---|---|");
    for (name, arguments, until) in TARGETS {
        if !wanted.is_empty() && !wanted.iter().any(|one| one == name) {
            continue;
        }
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let begun = Instant::now();
        measure(arguments, until).map_err(|error| Error::Host(format!("make {name}: {error}")))?;
        let load = load.split(' ').next().unwrap_or_default();
        println!("| `make {name}` | {} | {load} |", in_words(begun.elapsed()));
    }
    println!("\ntarget/ has {:.1} GB.", used_gb()?);
    Ok(())
}

fn measure(arguments: &[&str], until: Until) -> Result<()> {
    let lab = std::env::current_exe().context(|| "find the command lab".to_owned())?;
    if until == Until::End {
        let output = Command::new(lab).args(arguments).stdin(Stdio::null()).output();
        let output = output.context(|| "run the command lab".to_owned())?;
        return match output.status.success() {
            true => Ok(()),
            false => Err(Error::Host(String::from_utf8_lossy(&output.stderr).into_owned())),
        };
    }
    // A terminal of its own, which `lab pair` needs.
    let line = format!("exec {} {}", lab.display(), arguments.join(" "));
    let mut terminal = Command::new("script");
    terminal.args(["-qec", &line, "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = terminal.spawn().context(|| "start script".to_owned())?;
    let found = child.stdout.take().is_some_and(shows_prompt);
    let _ = child.kill();
    let _ = child.wait();
    if found { Ok(()) } else { Err(Error::Host("no prompt came".to_owned())) }
}

/// Returns true when a prompt has come.
fn shows_prompt(mut screen: impl Read) -> bool {
    let (mut seen, mut piece) = (Vec::new(), [0_u8; 1024]);
    loop {
        match screen.read(&mut piece) {
            Ok(0) | Err(_) => return false,
            Ok(count) => seen.extend(&piece[..count]),
        }
        if seen.windows(PROMPT.len()).any(|bytes: &[u8]| bytes == PROMPT.as_bytes()) {
            return true;
        }
    }
}

fn in_words(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    match (seconds / 60, seconds % 60) {
        (0, seconds) => format!("{seconds} s"),
        (minutes, seconds) => format!("{minutes} min {seconds} s"),
    }
}

/// Returns the space of `target/` on the disk.
fn used_gb() -> Result<f64> {
    let target = paths::root().join("target");
    let output = Command::new("du").arg("-sk").arg(&target).output().context(|| "run du".to_owned())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let kib: Option<f64> = text.split_whitespace().next().and_then(|number| number.parse().ok());
    Ok(kib.ok_or_else(|| Error::Host(format!("du says `{text}`")))? * 1024.0 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_in_minutes_and_seconds() {
        let words = |seconds| in_words(Duration::from_secs_f64(seconds));
        assert_eq!(
            (words(59.4), words(59.6), words(125.0)),
            ("59 s".into(), "1 min 0 s".into(), "2 min 5 s".into())
        );
    }

    #[test]
    fn a_prompt_is_found_at_any_place() {
        assert!(shows_prompt(&b"Welcome\r\nroot@lab:~# "[..]));
        assert!(!shows_prompt(&b"Welcome\r\n~ #"[..]));
    }

    #[test]
    fn the_readme_has_all_targets() {
        let readme = std::fs::read_to_string(paths::root().join("README.md")).unwrap_or_default();
        let missing: Vec<_> =
            names().into_iter().filter(|name| !readme.contains(&format!("`make {name}`"))).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
