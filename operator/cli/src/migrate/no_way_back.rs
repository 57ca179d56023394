//! From the commit on another machine may run what stands still here. A panic would unwind, and so set it going: it must end the
//! process instead, with which nothing goes on.

use std::{fs::File, io::Write, panic};

/// From here on a panic ends this process at once, and is told at the console: whoever else would read it stands still.
pub fn begin(console: Option<File>) {
    panic::set_hook(Box::new(move |panic| {
        if let Some(mut console) = console.as_ref() {
            let _ = write!(
                console,
                "\r\nmercury migrate: {panic}\r\nThis process ends here; its guard asks on whether the other machine runs\r\n"
            );
        }
        std::process::abort();
    }));
}

/// The other machine has promised that it never runs it, or an operator has.
pub fn end() {
    drop(panic::take_hook());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::process::ExitStatusExt, process::Command};

    const NAME: &str = "migrate::no_way_back::tests::a_panic_undoes_nothing";
    const WHEN: &str = "MERCURY_TEST_PANICS";

    struct Held;

    impl Drop for Held {
        fn drop(&mut self) {
            println!("released");
        }
    }

    /// Holds something, panics, and so ends this process.
    fn panic_as(when: &str) {
        begin(None);
        if when == "after the end" {
            end();
        }
        let _held = Held;
        panic!("no thread can be made");
    }

    #[test]
    fn a_panic_undoes_nothing() {
        if let Some(when) = std::env::var_os(WHEN) {
            return panic_as(&when.to_string_lossy());
        }
        let run = |when| {
            let mut this = Command::new(std::env::current_exe().expect("this program"));
            this.args(["--exact", NAME, "--nocapture"]).env(WHEN, when);
            let output = this.output().expect("it runs");
            (output.status.signal(), String::from_utf8_lossy(&output.stdout).contains("released"))
        };
        assert_eq!(run("before the end"), (Some(libc::SIGABRT), false));
        assert_eq!(run("after the end"), (None, true), "otherwise the test says nothing");
    }
}
