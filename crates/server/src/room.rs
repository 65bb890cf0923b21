//! Places for answers that run or wait, and how long it takes until one is free.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A permit for each answer that may run or wait.
pub(crate) struct Room {
    places: Arc<Semaphore>,
    most: usize,
    lately: Arc<Mutex<Lately>>,
}

/// Places that are taken, as long as it lives.
pub(crate) struct Place {
    permit: OwnedSemaphorePermit,
    lately: Arc<Mutex<Lately>>,
}

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// There are never so many.
    Never {
        /// How many there are.
        most: usize,
    },
    /// There may be some after this time.
    Later(Duration),
}

impl Room {
    pub fn new(most: usize) -> Room {
        let most = most.clamp(1, Semaphore::MAX_PERMITS);
        Room { places: Arc::new(Semaphore::new(most)), most, lately: Arc::new(Mutex::new(Lately::new(Instant::now()))) }
    }

    /// Takes `n` places.
    ///
    /// # Errors
    /// There are not so many.
    pub fn take(&self, n: usize) -> Result<Place, Full> {
        if n > self.most {
            return Err(Full::Never { most: self.most });
        }
        let free = self.places.available_permits();
        let mut lately = self.lately.lock().unwrap_or_else(PoisonError::into_inner);
        if free == self.most {
            *lately = Lately::new(Instant::now());
        }
        match self.places.clone().try_acquire_many_owned(u32::try_from(n).unwrap_or(u32::MAX)) {
            Ok(permit) => Ok(Place { permit, lately: self.lately.clone() }),
            Err(_) => Err(Full::Later(lately.wait(n.saturating_sub(free).max(1), Instant::now()))),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut lately = self.lately.lock().unwrap_or_else(PoisonError::into_inner);
        lately.ended(self.permit.num_permits(), Instant::now());
    }
}

/// When answers ended: in the last time, and since somebody has been there.
struct Lately {
    since: Instant,
    ends: VecDeque<Instant>,
}

impl Lately {
    /// How far back it looks, and how many answers.
    const WINDOW: Duration = Duration::from_secs(60);
    const MOST: usize = 256;
    /// What a client is asked to wait, at least and at most.
    const WAIT: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

    fn new(since: Instant) -> Lately {
        Lately { since, ends: VecDeque::new() }
    }

    fn ended(&mut self, n: usize, now: Instant) {
        self.ends.extend(std::iter::repeat_n(now, n.min(Lately::MOST)));
        while self.ends.len() > Lately::MOST {
            self.since = self.ends.pop_front().unwrap_or(self.since);
        }
    }

    /// How long until `n` more answers end, if they go on to end as they did. One is counted that has not ended yet, so
    /// that it takes the longer the longer none has ended.
    fn wait(&mut self, n: usize, now: Instant) -> Duration {
        while self.ends.front().is_some_and(|&end| now.duration_since(end) > Lately::WINDOW) {
            self.ends.pop_front();
        }
        let time = now.duration_since(self.since).min(Lately::WINDOW).as_secs_f64();
        let wait = time * n as f64 / (self.ends.len() + 1) as f64;
        Duration::from_secs_f64(wait.min(Lately::WAIT[1].as_secs_f64())).max(Lately::WAIT[0])
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn places_come_as_fast_as_answers_end() {
        let start = Instant::now();
        let mut lately = Lately::new(start);
        assert_eq!(lately.wait(1, start), SECOND, "nothing is known yet");
        assert_eq!(lately.wait(1, start + 7 * SECOND), 7 * SECOND, "none has ended for so long");
        assert_eq!(lately.wait(4, start + 7 * SECOND), 28 * SECOND);
        assert_eq!(lately.wait(9, start + 10 * SECOND), 60 * SECOND, "nobody waits for longer");
        assert_eq!(lately.wait(1, start + 3600 * SECOND), 60 * SECOND);
        // One in five seconds.
        let mut lately = Lately::new(start);
        (1..=39).for_each(|i| lately.ended(1, start + 5 * i * SECOND));
        let found = lately.wait(2, start + 200 * SECOND).as_secs_f64();
        assert!((9.0..11.0).contains(&found), "{found}");
        // Many at once, and more than are remembered: those that are, ended since the last one of the others.
        lately.ended(10_000, start + 200 * SECOND);
        assert!(lately.ends.len() <= Lately::MOST);
        let found = lately.wait(256, start + 210 * SECOND).as_secs_f64();
        assert!((14.0..15.0).contains(&found), "{found}");
        assert_eq!(lately.wait(1, start + 210 * SECOND), SECOND);
    }

    #[test]
    fn a_room_that_was_empty_begins_anew() {
        let room = Room::new(2);
        assert!(matches!(room.take(3), Err(Full::Never { most: 2 })));
        room.lately.lock().unwrap().since -= 50 * SECOND;
        let place = room.take(1).unwrap();
        assert!(matches!(room.take(2), Err(Full::Later(SECOND))));
        room.lately.lock().unwrap().since -= 20 * SECOND;
        let Err(Full::Later(wait)) = room.take(2) else { panic!("one place is taken") };
        assert!((20 * SECOND..25 * SECOND).contains(&wait), "{wait:?}");
        drop(place);
        assert_eq!(room.lately.lock().unwrap().ends.len(), 1);
        drop(room.take(2).unwrap());
    }
}
