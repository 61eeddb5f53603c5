"""Who the other replicas are."""

from meantime.replicas.agreement import check_agreement as check_agreement
from meantime.replicas.base import Replicas as Replicas
from meantime.replicas.base import resolve as resolve
from meantime.replicas.distributed import Distributed as Distributed
from meantime.replicas.named_axis import NamedAxis as NamedAxis
from meantime.replicas.recorded import Recorded as Recorded
from meantime.replicas.solo import Solo as Solo
from meantime.replicas.vmapped import Vmapped as Vmapped
