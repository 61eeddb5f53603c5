"""Test your own transforms: a battery of laws, and strategies that draw what to try them on.

    from meantime.testing import check_transform

    def test_my_optimizer():
        check_transform(my_optimizer(1e-3))

`check_transform` tries every law of transforms, `check_averager` those of averaging. The laws
are functions of their own in `laws`, `transformations` and `averaging`; `strategies` draws
trees, replicas and timetables for tests with hypothesis. Needs the extra `meantime[testing]`.
"""

from meantime.testing import averaging as averaging
from meantime.testing import laws as laws
from meantime.testing import strategies as strategies
from meantime.testing import transformations as transformations
from meantime.testing.battery import check_averager as check_averager
from meantime.testing.battery import check_transform as check_transform
from meantime.testing.cases import Case as Case
from meantime.testing.cases import LawViolation as LawViolation
